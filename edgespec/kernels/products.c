/* Products of rows with 4-bit weights, and what may stand before them: the operator `edgespec.RowsProduct`.
 *
 * It takes the inputs and attributes of com.microsoft.MatMulNBits with bits = 4 and computes the same thing: activations
 * rounded to 8 bits with a scale a row and block, integer dot products, float sums over the blocks. It differs in the order of
 * the work: up to 8 rows share one pass over the weights, each with sums of its own, so that a row costs little beside the
 * first and its bits do not depend on how many rows share its call.
 *
 * Before the product it may do what a decoder's layer does there, which saves nodes and the waiting between them (`mode`):
 * GATED takes rows [gate, up] of twice the length and multiplies silu(gate) * up; NORM takes the rows, adds SKIP where there
 * is one (the sum is the second output), and multiplies their RMS norm times GAMMA.
 *
 * Weights lie in tiles of 16 outputs; 64 bytes hold 8 inputs of each: bytes 4c .. 4c+3 belong to output c, their low nibbles
 * to the inputs 0..3 and their high nibbles to 4..7. With AVX-512 VNNI that is two instructions for 128 products; other CPUs
 * take the loops below as the compiler makes them.
 */

#include "activations.h"
#include "operators.h"

#define WIDTH 16  /* outputs of a tile */
#define DEPTH 8   /* inputs of 64 bytes */
#define MOST_ROWS 8
#define MOST (1 << 30) /* of N, K and block_size, so that their product fits */
#define AHEAD ZEROED_SPARE /* bytes fetched ahead: weights are read once, and the hardware stops at pages */

#define SERIAL_FLOATS 40000 /* prepared by the calling thread: handing fewer to another costs more than it saves */

enum { A, B, SCALES, ZEROS, GROUPS, BIAS, SKIP, GAMMA, N_INPUTS };
enum { OUT, SUM, N_OUTPUTS };
enum { PLAIN, GATED, NORM };

typedef struct {
    Api api;
    int64_t n, k, block;
    int64_t mode;
    float epsilon;
    int64_t pieces;  /* of the outputs, one for each thread: handing out smaller ones cost more than it evened out */
    int64_t n_tiles, n_blocks, n_steps;  /* steps: groups of DEPTH inputs of a row */
    uint8_t *codes;  /* [n_tiles, n_steps, 64] */
    float *scales;   /* [n_tiles, n_blocks, 2, 16]: scales, then minus scale times zero point */
    float *bias;     /* [n_tiles * 16] or NULL */
} Product;

typedef struct {
    const Product *product;
    int64_t rows;
    const float *x, *skip, *gamma;
    float *sum;     /* of x and skip */
    int8_t *codes;  /* [rows, n_steps * DEPTH] */
    float *scales;  /* [rows, n_blocks, 2]: scale, scale times sum of the codes */
    float *ready;   /* [rows, k]: what is rounded, where that is not x */
    float *out;
} Job;

/* ---- the rows, made ready ---- */

static void round_row(const Product *p, const float *x, int8_t *codes, float *scales)
{
    for (int64_t b = 0; b < p->n_blocks; b++) {
        int64_t first = b * p->block, n = p->k - first < p->block ? p->k - first : p->block;
        round_block(x + first, n, codes + first, scales + 2 * b, scales + 2 * b + 1);
    }
    memset(codes + p->k, 0, p->n_steps * DEPTH - p->k);
}

static void prepare_row(const Job *job, int64_t r)
{
    const Product *p = job->product;
    const float *x = job->x + r * p->k;
    float *ready = job->ready + r * p->k;
    if (p->mode == GATED) gate(job->x + 2 * r * p->k, p->k, ready);
    if (p->mode == NORM) {
        const float *skip = job->skip ? job->skip + r * p->k : NULL;
        normalize(x, skip, job->gamma, p->epsilon, p->k, job->sum + r * p->k, ready);
    }
    round_row(p, p->mode == PLAIN ? x : ready, job->codes + r * p->n_steps * DEPTH, job->scales + r * 2 * p->n_blocks);
}

static void prepare_piece(void *work, size_t piece)
{
    const Job *job = work;
    for (int64_t r = (int64_t)piece; r < job->rows; r += job->product->pieces) prepare_row(job, r);
}

/* ---- one tile of 16 outputs for R rows; R is a constant where it is inlined ---- */

static inline __attribute__((always_inline)) void tile_rows(const int R, const Job *job, int64_t tile, int64_t row)
{
    const Product *p = job->product;
    const int64_t width = p->n_steps * DEPTH, n_scales = 2 * p->n_blocks;
    const uint8_t *w = p->codes + tile * p->n_steps * 64;
    const float *ws = p->scales + tile * p->n_blocks * 2 * WIDTH;
    const int8_t *a = job->codes + row * width;
    const float *as = job->scales + row * n_scales;
    const int n_out = p->n - tile * WIDTH < WIDTH ? (int)(p->n - tile * WIDTH) : WIDTH;
#if HAS_VNNI
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 out[MOST_ROWS];
    for (int r = 0; r < R; r++) out[r] = p->bias ? _mm512_loadu_ps(p->bias + tile * WIDTH) : _mm512_setzero_ps();
    for (int64_t b = 0; b < p->n_blocks; b++) {
        int64_t first = b * (p->block / DEPTH), last = first + p->block / DEPTH;
        if (last > p->n_steps) last = p->n_steps;
        __m512i sum[MOST_ROWS];
        for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_si512();
        for (int64_t j = first; j < last; j++, w += 64) {
            __m512i v = _mm512_loadu_si512(w);
            _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
            __m512i low = _mm512_and_si512(v, nibble), high = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
            for (int r = 0; r < R; r++) {
                int32_t four[2];
                memcpy(four, a + r * width + j * DEPTH, sizeof four);
                sum[r] = _mm512_dpbusd_epi32(sum[r], low, _mm512_set1_epi32(four[0]));
                sum[r] = _mm512_dpbusd_epi32(sum[r], high, _mm512_set1_epi32(four[1]));
            }
        }
        __m512 scale = _mm512_loadu_ps(ws), offset = _mm512_loadu_ps(ws + WIDTH);
        ws += 2 * WIDTH;
        for (int r = 0; r < R; r++) {
            __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(as[r * n_scales + 2 * b]));
            out[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), both, out[r]);
            out[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(as[r * n_scales + 2 * b + 1]), out[r]);
        }
    }
    __mmask16 here = (__mmask16)((1u << n_out) - 1);
    for (int r = 0; r < R; r++) _mm512_mask_storeu_ps(job->out + (row + r) * p->n + tile * WIDTH, here, out[r]);
#else
    for (int r = 0; r < R; r++) {
        const uint8_t *wr = w;
        const float *wsr = ws;
        float out[WIDTH];
        for (int c = 0; c < WIDTH; c++) out[c] = p->bias ? p->bias[tile * WIDTH + c] : 0.0f;
        for (int64_t b = 0; b < p->n_blocks; b++, wsr += 2 * WIDTH) {
            int64_t first = b * (p->block / DEPTH), last = first + p->block / DEPTH;
            if (last > p->n_steps) last = p->n_steps;
            int32_t sum[WIDTH] = {0};
            for (int64_t j = first; j < last; j++, wr += 64) {
                const int8_t *x = a + r * width + j * DEPTH;
                for (int c = 0; c < WIDTH; c++)
                    for (int i = 0; i < 4; i++)
                        sum[c] += (wr[4 * c + i] & 15) * x[i] + (wr[4 * c + i] >> 4) * x[4 + i];
            }
            for (int c = 0; c < WIDTH; c++) {
                out[c] += (float)sum[c] * (wsr[c] * as[r * n_scales + 2 * b]);
                out[c] += wsr[WIDTH + c] * as[r * n_scales + 2 * b + 1];
            }
        }
        memcpy(job->out + (row + r) * p->n + tile * WIDTH, out, sizeof(float) * n_out);
    }
#endif
}

static void run_tile(const Job *job, int64_t tile)
{
    int64_t row = 0;
    for (; job->rows - row >= MOST_ROWS; row += MOST_ROWS) tile_rows(MOST_ROWS, job, tile, row);
    switch (job->rows - row) {
        case 1: tile_rows(1, job, tile, row); break;
        case 2: tile_rows(2, job, tile, row); break;
        case 3: tile_rows(3, job, tile, row); break;
        case 4: tile_rows(4, job, tile, row); break;
        case 5: tile_rows(5, job, tile, row); break;
        case 6: tile_rows(6, job, tile, row); break;
        case 7: tile_rows(7, job, tile, row); break;
        default: break;
    }
}

static void run_piece(void *work, size_t piece)
{
    const Job *job = work;
    const int64_t n = job->product->n_tiles, of = job->product->pieces, i = (int64_t)piece;
    for (int64_t tile = n * i / of; tile < n * (i + 1) / of; tile++) run_tile(job, tile);
}

/* ---- the weights, laid out once ---- */

static uint8_t code_of(const uint8_t *row, int64_t i)
{
    return i % 2 ? row[i / 2] >> 4 : row[i / 2] & 15;
}

static void lay_out(Product *p, const uint8_t *b, const float *scales, const uint8_t *zeros, const float *bias)
{
    const int64_t row_bytes = p->n_blocks * p->block / 2, zero_bytes = (p->n_blocks + 1) / 2;
    for (int64_t o = 0; o < p->n; o++) {
        const int64_t tile = o / WIDTH, c = o % WIDTH;
        for (int64_t i = 0; i < p->k; i++) {
            uint8_t *byte = p->codes + (tile * p->n_steps + i / DEPTH) * 64 + 4 * c + i % 4;
            *byte |= (uint8_t)(code_of(b + o * row_bytes, i) << (i % DEPTH < 4 ? 0 : 4));
        }
        for (int64_t k = 0; k < p->n_blocks; k++) {
            float scale = scales[o * p->n_blocks + k], zero = zeros ? code_of(zeros + o * zero_bytes, k) : 8;
            float *place = p->scales + (tile * p->n_blocks + k) * 2 * WIDTH + c;
            place[0] = scale;
            place[WIDTH] = -scale * zero;
        }
        if (bias) p->bias[o] = bias[o];
    }
}

/* ---- the operator ---- */

/* NULL for an optional input that is not there. wanted: how many numbers it must hold, or else the file is damaged. */
static Status constant(Api api, const void *info, size_t index, size_t n_inputs, int64_t wanted, const void **data)
{
    int is_constant = 0;
    const void *value = NULL;
    void *shape = NULL;
    size_t n = 0;
    *data = NULL;
    if (index >= n_inputs) return NULL;
    TRY(CALL(api, F_CONSTANT, info, index, &is_constant, &value));
    if (!is_constant || !value) return NULL;
    TRY(CALL(api, F_SHAPE, value, &shape));
    Status status = CALL(api, F_COUNT, shape, &n);
    ((void (*)(void *))api[F_FREE_SHAPE])(shape);
    if (status) return status;
    if ((int64_t)n != wanted) return failure(api, "RowsProduct: an input is not as large as N, K and block_size say");
    return CALL(api, F_DATA, value, data);
}

static void destroy(void *kernel)
{
    Product *p = kernel;
    if (!p) return;
    free(p->codes);
    free(p->scales);
    free(p->bias);
    free(p);
}

static Status create(const void *op, Api api, const void *info, void **kernel)
{
    (void)op;
    const void *b, *scales, *zeros, *groups, *bias;
    size_t n_inputs = 0;
    int64_t bits = 0;
    Product *p = calloc(1, sizeof *p);
    if (!p) return failure(api, "RowsProduct: no memory");
    *kernel = p;
    p->api = api;
    TRY(CALL(api, F_INT, info, "N", &p->n));
    TRY(CALL(api, F_INT, info, "K", &p->k));
    TRY(CALL(api, F_INT, info, "bits", &bits));
    TRY(CALL(api, F_INT, info, "block_size", &p->block));
    TRY(CALL(api, F_INT, info, "pieces", &p->pieces));
    TRY(CALL(api, F_N_INPUTS, info, &n_inputs));
    if (p->n < 1 || p->k < 1 || p->block < DEPTH || p->n > MOST || p->k > MOST || p->block > MOST)
        return failure(api, "RowsProduct: N, K or block_size cannot be");
    p->n_tiles = (p->n + WIDTH - 1) / WIDTH;
    p->n_blocks = (p->k + p->block - 1) / p->block;
    p->n_steps = (p->k + DEPTH - 1) / DEPTH;
    TRY(constant(api, info, B, n_inputs, p->n * p->n_blocks * (p->block / 2), &b));
    TRY(constant(api, info, SCALES, n_inputs, p->n * p->n_blocks, &scales));
    TRY(constant(api, info, ZEROS, n_inputs, p->n * ((p->n_blocks + 1) / 2), &zeros));
    TRY(constant(api, info, GROUPS, n_inputs, 0, &groups));
    TRY(constant(api, info, BIAS, n_inputs, p->n, &bias));
    TRY(CALL(api, F_INT, info, "mode", &p->mode));
    if (p->mode == NORM) TRY(CALL(api, F_FLOAT, info, "epsilon", &p->epsilon));
    if (p->mode != PLAIN && p->k % LANES) return failure(api, "RowsProduct: K must be a multiple of 16 in this mode");
    if (bits != 4 || p->pieces < 1 || p->block % DEPTH || !b || !scales || groups)
        return failure(api, "RowsProduct: needs constant 4-bit weights in blocks, without g_idx");
    p->codes = zeroed_memory(p->n_tiles * p->n_steps * 64);
    p->scales = zeroed_memory(sizeof(float) * p->n_tiles * p->n_blocks * 2 * WIDTH);
    if (bias) p->bias = zeroed_memory(sizeof(float) * p->n_tiles * WIDTH);
    if (!p->codes || !p->scales || (bias && !p->bias)) return failure(api, "RowsProduct: no memory for the weights");
    lay_out(p, b, scales, zeros, bias);
    return NULL;
}

/* An input's data and shape; rank 0: it is not there (data is NULL for no rows, too). */
static Status read(const Product *p, void *context, size_t index, const float **data, int64_t *dims, size_t *rank)
{
    const void *value = NULL;
    void *shape = NULL;
    *data = NULL;
    *rank = 0;
    TRY(CALL(p->api, F_INPUT, context, index, &value));
    if (!value) return NULL;
    TRY(CALL(p->api, F_SHAPE, value, &shape));
    TRY(CALL(p->api, F_RANK, shape, rank));
    Status status = *rank < 1 || *rank > MOST_DIMS ? failure(p->api, "RowsProduct: activations need 1 to 8 dimensions")
                                                   : CALL(p->api, F_DIMS, shape, dims, *rank);
    ((void (*)(void *))p->api[F_FREE_SHAPE])(shape);
    if (status) return status;
    return CALL(p->api, F_DATA, value, data);
}

static Status write(const Product *p, void *context, size_t index, const int64_t *dims, size_t rank, float **data)
{
    void *value = NULL;
    TRY(CALL(p->api, F_OUTPUT, context, index, dims, rank, &value));
    return CALL(p->api, F_DATA, value, data);
}

static Status open_job(const Product *p, void *context, Job *job)
{
    int64_t dims[MOST_DIMS], others[MOST_DIMS];
    size_t rank, other_rank;
    TRY(read(p, context, A, &job->x, dims, &rank));
    int is_right = rank && dims[rank - 1] == (p->mode == GATED ? 2 * p->k : p->k);
    job->rows = 1;
    for (size_t i = 0; i + 1 < rank; i++) job->rows *= dims[i];
    if (p->mode == NORM) {
        TRY(read(p, context, GAMMA, &job->gamma, others, &other_rank));
        is_right = is_right && other_rank == 1 && others[0] == p->k;
        TRY(read(p, context, SKIP, &job->skip, others, &other_rank));
        if (other_rank) {
            is_right = is_right && other_rank == rank && !memcmp(dims, others, rank * sizeof *dims);
            if (is_right) TRY(write(p, context, SUM, dims, rank, &job->sum));
        }
    }
    if (!is_right) return failure(p->api, "RowsProduct: shapes that do not fit the weights");
    dims[rank - 1] = p->n;
    return write(p, context, OUT, dims, rank, &job->out);
}

static Status run(const Product *p, void *context, void (*work)(void *, size_t), Job *job, int is_serial)
{
    if (!is_serial) return CALL(p->api, F_PARALLEL, context, work, (size_t)p->pieces, (size_t)0, (void *)job);
    for (int64_t piece = 0; piece < p->pieces; piece++) work(job, piece);
    return NULL;
}

static Status compute(void *kernel, void *context)
{
    const Product *p = kernel;
    Job job = {.product = p};
    TRY(open_job(p, context, &job));
    if (!job.rows) return NULL;
    const size_t n_scales = 2 * p->n_blocks, n_ready = p->mode == PLAIN ? 0 : p->k, width = p->n_steps * DEPTH;
    char *memory = malloc(job.rows * (sizeof(float) * (n_scales + n_ready) + width));
    if (!memory) return failure(p->api, "RowsProduct: no memory for the activations");
    job.scales = (float *)memory;
    job.ready = job.scales + job.rows * n_scales;
    job.codes = (int8_t *)(job.ready + job.rows * n_ready);
    if (!job.sum) job.sum = job.ready; /* never written without a skip */
    Status status = run(p, context, prepare_piece, &job, job.rows * p->k * (p->mode == GATED ? 4 : 1) < SERIAL_FLOATS);
    if (!status) status = run(p, context, run_piece, &job, 0);
    free(memory);
    return status;
}

static const char *name(const void *op) { (void)op; return "RowsProduct"; }
static int input_type(const void *op, size_t i)
{
    (void)op;
    return i == B || i == ZEROS ? UINT8 : i == GROUPS ? INT32 : FLOAT;
}
static size_t n_inputs(const void *op) { (void)op; return N_INPUTS; }
static size_t n_outputs(const void *op) { (void)op; return N_OUTPUTS; }
static int input_kind(const void *op, size_t i) { (void)op; return i < ZEROS ? REQUIRED : OPTIONAL; }
static int output_kind(const void *op, size_t i) { (void)op; return i == OUT ? REQUIRED : OPTIONAL; }

const Operator ROWS_PRODUCT = OPERATOR(name, input_type, n_inputs, n_outputs, input_kind, output_kind, create, compute, destroy);

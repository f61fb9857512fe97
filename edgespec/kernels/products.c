/* Products of rows with 4-bit weights: the operator `edgespec.RowsProduct`.
 *
 * It takes the inputs and attributes of com.microsoft.MatMulNBits with bits = 4 and computes the same thing: activations
 * rounded to 8 bits with a scale a row and block, integer dot products, float sums over the blocks. It differs in the order of
 * the work: up to 8 rows share one pass over the weights, each with sums of its own, so that a row costs little beside the
 * first and its bits do not depend on how many rows share its call.
 *
 * Weights lie in tiles of 16 outputs; 64 bytes hold 8 inputs of each: bytes 4c .. 4c+3 belong to output c, their low nibbles
 * to the inputs 0..3 and their high nibbles to 4..7. With AVX-512 VNNI that is two instructions for 128 products; other CPUs
 * take the loops below as the compiler makes them.
 */

#include "operators.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(PORTABLE)
#include <immintrin.h>
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

#define WIDTH 16  /* outputs of a tile */
#define DEPTH 8   /* inputs of 64 bytes */
#define MOST_ROWS 8
#define AHEAD ZEROED_SPARE /* bytes fetched ahead: weights are read once, and the hardware stops at pages */

enum { A, B, SCALES, ZEROS, GROUPS, BIAS, N_INPUTS };

typedef struct {
    Api api;
    int64_t n, k, block;
    int64_t pieces;  /* of the outputs, one for each thread: handing out smaller ones cost more than it evened out */
    int64_t n_tiles, n_blocks, n_steps;  /* steps: groups of DEPTH inputs of a row */
    uint8_t *codes;  /* [n_tiles, n_steps, 64] */
    float *scales;   /* [n_tiles, n_blocks, 2, 16]: scales, then minus scale times zero point */
    float *bias;     /* [n_tiles * 16] or NULL */
} Product;

typedef struct {
    const Product *product;
    int64_t rows;
    const int8_t *codes;  /* [rows, n_steps * DEPTH] */
    const float *scales;  /* [rows, n_blocks, 2]: scale, scale times sum of the codes */
    float *out;
} Job;

/* ---- rounding of activations ---- */

static void round_block(const float *x, int64_t n, int8_t *codes, float *scale, float *sum)
{
    float most = 0;
    int is_broken = 0;
    int32_t total = 0;
#if HAS_VNNI
    __m512 top = _mm512_setzero_ps();
    __mmask16 bad = 0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 here = n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
        __m512 v = _mm512_maskz_loadu_ps(here, x + i);
        bad |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        top = _mm512_max_ps(top, _mm512_abs_ps(v));
    }
    most = _mm512_reduce_max_ps(top);
    is_broken = bad != 0;
#else
    for (int64_t i = 0; i < n; i++) {
        float v = fabsf(x[i]);
        is_broken |= v != v;
        most = v > most ? v : most;
    }
#endif
    float factor = most > 0 ? 127.0f / most : 0.0f;
#if HAS_VNNI
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 here = n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
        __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(here, x + i), _mm512_set1_ps(factor)));
        sums = _mm512_add_epi32(sums, q);
        _mm512_mask_cvtepi32_storeu_epi8(codes + i, here, q);
    }
    total = _mm512_reduce_add_epi32(sums);
#else
    for (int64_t i = 0; i < n; i++) {
        int32_t q = (int32_t)nearbyintf(x[i] * factor);
        codes[i] = (int8_t)q;
        total += q;
    }
#endif
    *scale = is_broken ? NAN : most / 127.0f;
    *sum = *scale * (float)total;
}

static void round_row(const Product *p, const float *x, int8_t *codes, float *scales)
{
    for (int64_t b = 0; b < p->n_blocks; b++) {
        int64_t first = b * p->block, n = p->k - first < p->block ? p->k - first : p->block;
        round_block(x + first, n, codes + first, scales + 2 * b, scales + 2 * b + 1);
    }
    memset(codes + p->k, 0, p->n_steps * DEPTH - p->k);
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

/* NULL for an optional input that is not there. */
static Status constant(Api api, const void *info, size_t index, size_t n_inputs, const void **data)
{
    int is_constant = 0;
    const void *value = NULL;
    *data = NULL;
    if (index >= n_inputs) return NULL;
    TRY(CALL(api, F_CONSTANT, info, index, &is_constant, &value));
    if (is_constant && value) TRY(CALL(api, F_DATA, value, data));
    return NULL;
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
    TRY(constant(api, info, B, n_inputs, &b));
    TRY(constant(api, info, SCALES, n_inputs, &scales));
    TRY(constant(api, info, ZEROS, n_inputs, &zeros));
    TRY(constant(api, info, GROUPS, n_inputs, &groups));
    TRY(constant(api, info, BIAS, n_inputs, &bias));
    if (bits != 4 || p->pieces < 1 || p->block % DEPTH || !b || !scales || groups)
        return failure(api, "RowsProduct: needs constant 4-bit weights in blocks, without g_idx");
    p->n_tiles = (p->n + WIDTH - 1) / WIDTH;
    p->n_blocks = (p->k + p->block - 1) / p->block;
    p->n_steps = (p->k + DEPTH - 1) / DEPTH;
    p->codes = zeroed_memory(p->n_tiles * p->n_steps * 64);
    p->scales = zeroed_memory(sizeof(float) * p->n_tiles * p->n_blocks * 2 * WIDTH);
    if (bias) p->bias = zeroed_memory(sizeof(float) * p->n_tiles * WIDTH);
    if (!p->codes || !p->scales || (bias && !p->bias)) return failure(api, "RowsProduct: no memory for the weights");
    lay_out(p, b, scales, zeros, bias);
    return NULL;
}

static Status output_of(const Product *p, void *context, const float **x, float **out, int64_t *rows)
{
    const void *input = NULL;
    void *shape = NULL, *output = NULL;
    int64_t dims[8];
    size_t rank = 0;
    TRY(CALL(p->api, F_INPUT, context, (size_t)A, &input));
    TRY(CALL(p->api, F_SHAPE, input, &shape));
    TRY(CALL(p->api, F_RANK, shape, &rank));
    if (rank < 1 || rank > 8) return failure(p->api, "RowsProduct: activations need 1 to 8 dimensions");
    TRY(CALL(p->api, F_DIMS, shape, dims, rank));
    ((void (*)(void *))p->api[F_FREE_SHAPE])(shape);
    if (dims[rank - 1] != p->k) return failure(p->api, "RowsProduct: the activations' last dimension is not K");
    *rows = 1;
    for (size_t i = 0; i + 1 < rank; i++) *rows *= dims[i];
    dims[rank - 1] = p->n;
    TRY(CALL(p->api, F_DATA, input, x));
    TRY(CALL(p->api, F_OUTPUT, context, (size_t)0, dims, rank, &output));
    return CALL(p->api, F_DATA, output, out);
}

static Status compute(void *kernel, void *context)
{
    const Product *p = kernel;
    const float *x;
    Job job = {.product = p};
    TRY(output_of(p, context, &x, &job.out, &job.rows));
    if (!job.rows) return NULL;
    const size_t width = p->n_steps * DEPTH, scale_bytes = sizeof(float) * 2 * p->n_blocks;
    char *memory = malloc(job.rows * (scale_bytes + width));
    if (!memory) return failure(p->api, "RowsProduct: no memory for the activations");
    float *scales = (float *)memory;
    int8_t *codes = (int8_t *)(memory + job.rows * scale_bytes);
    for (int64_t r = 0; r < job.rows; r++) round_row(p, x + r * p->k, codes + r * width, scales + r * 2 * p->n_blocks);
    job.scales = scales;
    job.codes = codes;
    Status status = CALL(p->api, F_PARALLEL, context, run_piece, (size_t)p->pieces, (size_t)0, (void *)&job);
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
static size_t n_outputs(const void *op) { (void)op; return 1; }
static int input_kind(const void *op, size_t i) { (void)op; return i < ZEROS ? REQUIRED : OPTIONAL; }

const Operator ROWS_PRODUCT = OPERATOR(name, input_type, n_inputs, n_outputs, input_kind, create, compute, destroy);

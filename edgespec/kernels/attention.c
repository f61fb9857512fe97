/* Attention of a call's rows over a KV cache: the operator `edgespec.RowsAttention`.
 *
 * It takes the inputs and attributes of com.microsoft.GroupQueryAttention in float32 and computes the same thing: rotates
 * queries and keys, writes keys and values into the cache (in place where past and present are one buffer), and lets each
 * row see what is cached before it and itself. Every row is worked out by itself and in one order, so its bits do not depend
 * on how many rows share its call, a single one included.
 *
 * Vectors are those of GCC and clang, which any CPU's instructions are made of.
 */

#include "lanes.h"
#include "operators.h"

#define SERIAL_WORK 60000 /* multiplications below which handing rows to another thread costs more than it saves */

enum { QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LENGTHS, TOTAL, COS, SIN, POSITIONS, BIAS, N_INPUTS };
enum { OUT, PRESENT_KEY, PRESENT_VALUE, N_OUTPUTS };

typedef struct {
    Api api;
    int64_t n_heads, n_kv, pieces, has_rotation;
    float scale;
} Attention;

typedef struct {
    int64_t rank, dims[MOST_DIMS];
    void *data; /* NULL: the input is not there */
} Array;

typedef struct {
    const Attention *op;
    int64_t n_batch, n_rows, dim, capacity, past, half; /* half: pairs that are rotated */
    int64_t packed;                                     /* floats of a row of `query` */
    const float *query, *key, *value;                   /* [batch, rows, ...]; key and value start inside query if packed */
    int64_t key_stride;
    const float *cos, *sin, *bias;
    const int64_t *positions;
    int64_t bias_batch, bias_head; /* strides, 0 where shared */
    float *keys, *values, *out;
    float *scratch; /* [pieces, scores of a row + a query] */
} Job;

static void rotate(const Job *job, const float *x, float *y, int64_t position)
{
    const float *c = job->cos + position * job->half, *s = job->sin + position * job->half;
    if (!job->half) {
        memcpy(y, x, sizeof(float) * job->dim);
        return;
    }
    for (int64_t i = 0; i < job->half; i++) {
        float a = x[i], b = x[i + job->half];
        y[i] = a * c[i] - b * s[i];
        y[i + job->half] = b * c[i] + a * s[i];
    }
    memcpy(y + 2 * job->half, x + 2 * job->half, sizeof(float) * (job->dim - 2 * job->half));
}

static int64_t position_of(const Job *job, int64_t batch, int64_t row)
{
    return job->positions ? job->positions[batch * job->n_rows + row] : job->past + row;
}

/* Keys and values of one row into the cache. */
static void store(const Job *job, int64_t batch, int64_t row)
{
    const int64_t at = batch * job->n_rows + row, n_kv = job->op->n_kv;
    for (int64_t h = 0; h < n_kv; h++) {
        const int64_t place = ((batch * n_kv + h) * job->capacity + job->past + row) * job->dim;
        rotate(job, job->key + at * job->key_stride + h * job->dim, job->keys + place, position_of(job, batch, row));
        memcpy(job->values + place, job->value + at * job->key_stride + h * job->dim, sizeof(float) * job->dim);
    }
}

/* The sums of 4 vectors at once: halves are added until each has one lane left. */
static inline void four_sums(const Lanes x[4], float *out)
{
#define HALVES(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
    Lanes a = HALVES(x[0], x[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
              + HALVES(x[0], x[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    Lanes b = HALVES(x[2], x[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
              + HALVES(x[2], x[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    Lanes c = HALVES(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
              + HALVES(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    Lanes d = c + HALVES(c, c, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    Lanes e = d + HALVES(d, d, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    for (int i = 0; i < 4; i++) out[i] = e[4 * i];
#undef HALVES
}

/* Scores of n keys. */
static void score(const float *query, const float *keys, int64_t n, int64_t dim, float scale, float *scores)
{
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
        const float *key = keys + j * dim;
        Lanes sum[4] = {{0}, {0}, {0}, {0}};
        for (int64_t i = 0; i < dim; i += LANES) {
            const Lanes q = LOAD(query + i);
            for (int k = 0; k < 4; k++) sum[k] += q * LOAD(key + k * dim + i);
        }
        float dots[4];
        four_sums(sum, dots);
        for (int k = 0; k < 4; k++) scores[j + k] = scale * dots[k];
    }
    for (; j < n; j++) {
        const float *key = keys + j * dim;
        Lanes sum[4] = {{0}, {0}, {0}, {0}};
        for (int64_t i = 0; i < dim; i += LANES) sum[0] += LOAD(query + i) * LOAD(key + i);
        float dots[4];
        four_sums(sum, dots);
        scores[j] = scale * dots[0];
    }
}

/* Turns n scores, padded to whole lanes, into e^(score - largest); returns their sum. */
static float weigh(float *scores, int64_t n)
{
    const int64_t padded = (n + LANES - 1) / LANES * LANES;
    for (int64_t j = n; j < padded; j++) scores[j] = -INFINITY;
    Lanes top = LOAD(scores), sum = {0};
    for (int64_t j = LANES; j < padded; j += LANES) {
        const Lanes x = LOAD(scores + j);
        const Ints is_more = x > top;
        top = (Lanes)(((Ints)x & is_more) | ((Ints)top & ~is_more));
    }
    float most = top[0];
    for (int l = 1; l < LANES; l++) most = top[l] > most ? top[l] : most;
    for (int64_t j = 0; j < padded; j += LANES) {
        const Lanes e = exponential(LOAD(scores + j) - EVERY(most));
        *(Lanes *)(scores + j) = e;
        sum += e;
    }
    return lanes_sum(sum);
}

static void mix(const float *weights, const float *values, int64_t n, int64_t dim, float *out, float factor)
{
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        Lanes sum[4] = {{0}, {0}, {0}, {0}};
        for (int64_t j = 0; j < n; j++)
            for (int k = 0; k < 4; k++) sum[k] += EVERY(weights[j]) * LOAD(values + j * dim + i + k * LANES);
        for (int k = 0; k < 4; k++) *(Lanes *)(out + i + k * LANES) = sum[k] * EVERY(factor);
    }
    for (; i + LANES <= dim; i += LANES) {
        Lanes sum = {0};
        for (int64_t j = 0; j < n; j++) sum += EVERY(weights[j]) * LOAD(values + j * dim + i);
        *(Lanes *)(out + i) = sum * EVERY(factor);
    }
}

static void attend(const Job *job, int64_t batch, int64_t row, int64_t head, float *scratch)
{
    const Attention *op = job->op;
    const int64_t at = batch * job->n_rows + row, dim = job->dim, n = job->past + row + 1;
    const int64_t first = (batch * op->n_kv + head / (op->n_heads / op->n_kv)) * job->capacity * dim;
    const float scale = op->scale ? op->scale : 1.0f / sqrtf((float)dim);
    float *query = scratch, *scores = scratch + dim;
    rotate(job, job->query + at * job->packed + head * dim, query, position_of(job, batch, row));
    score(query, job->keys + first, n, dim, scale, scores);
    if (job->bias) {
        const float *bias = job->bias + batch * job->bias_batch + head * job->bias_head
                            + row * (job->past + job->n_rows);
        for (int64_t j = 0; j < n; j++) scores[j] += bias[j];
    }
    float sum = weigh(scores, n);
    mix(scores, job->values + first, n, dim, job->out + (at * op->n_heads + head) * dim, 1.0f / sum);
}

static int64_t scratch_size(const Job *job)
{
    return job->dim + (job->past + job->n_rows + LANES - 1) / LANES * LANES;
}

/* A piece is a run of queries in the order of the keys that they need, so that a thread reads its keys once for all heads
 * and rows that share them: with every other head to a thread, a row on 1,000 tokens took 1.6 times as long. */
static void run_piece(void *work, size_t piece)
{
    const Job *job = work;
    const int64_t n_kv = job->op->n_kv, group = job->op->n_heads / n_kv, rows = job->n_rows;
    const int64_t n = job->n_batch * n_kv * rows * group, i = (int64_t)piece, of = job->op->pieces;
    float *scratch = job->scratch + scratch_size(job) * i;
    for (int64_t at = n * i / of; at < n * (i + 1) / of; at++) {
        const int64_t row = at / group % rows, kv = at / group / rows % n_kv, batch = at / group / rows / n_kv;
        attend(job, batch, row, kv * group + at % group, scratch);
    }
}

/* ---- the operator ---- */

static void destroy(void *kernel) { free(kernel); }

static void forget(Api api, Status status)
{
    if (status) ((void (*)(void *))api[F_FREE_STATUS])(status);
}

static Status create(const void *op_, Api api, const void *info, void **kernel)
{
    (void)op_;
    Attention *op = calloc(1, sizeof *op);
    if (!op) return failure(api, "RowsAttention: no memory");
    *kernel = op;
    op->api = api;
    TRY(CALL(api, F_INT, info, "num_heads", &op->n_heads));
    TRY(CALL(api, F_INT, info, "kv_num_heads", &op->n_kv));
    forget(api, CALL(api, F_INT, info, "do_rotary", &op->has_rotation)); /* 0 where they are left out */
    forget(api, CALL(api, F_FLOAT, info, "scale", &op->scale));
    TRY(CALL(api, F_INT, info, "pieces", &op->pieces));
    if (op->pieces < 1 || op->n_kv < 1 || op->n_heads < 1 || op->n_heads % op->n_kv)
        return failure(api, "RowsAttention: heads that do not fit");
    return NULL;
}

static Status read(Api api, void *context, size_t index, Array *array)
{
    const void *value = NULL;
    void *shape = NULL;
    size_t rank = 0;
    memset(array, 0, sizeof *array);
    TRY(CALL(api, F_INPUT, context, index, &value));
    if (!value) return NULL;
    TRY(CALL(api, F_SHAPE, value, &shape));
    TRY(CALL(api, F_RANK, shape, &rank));
    array->rank = (int64_t)rank;
    Status status = rank > MOST_DIMS ? failure(api, "RowsAttention: too many dimensions")
                                     : CALL(api, F_DIMS, shape, array->dims, rank);
    ((void (*)(void *))api[F_FREE_SHAPE])(shape);
    if (status) return status;
    return CALL(api, F_DATA, value, &array->data);
}

static Status write(Api api, void *context, size_t index, const int64_t *dims, size_t rank, float **data)
{
    void *value = NULL;
    TRY(CALL(api, F_OUTPUT, context, index, dims, rank, &value));
    return CALL(api, F_DATA, value, data);
}

static int has_shape(const Array *array, int64_t rank, int64_t a, int64_t b, int64_t c)
{
    return array->rank == rank && array->dims[0] == a && array->dims[1] == b && (rank < 3 || array->dims[2] == c);
}

/* Caches, tables of the rotation and keys are as large as what is read of them. */
static int is_fitting(const Job *job, const Array *in)
{
    const int64_t n_batch = job->n_batch, n_rows = job->n_rows, n_kv = job->op->n_kv, old = in[PAST_KEY].dims[2];
    if (!has_shape(&in[PAST_KEY], 4, n_batch, n_kv, old) || !has_shape(&in[PAST_VALUE], 4, n_batch, n_kv, old)) return 0;
    if (in[PAST_VALUE].dims[3] != job->dim || job->past < 0 || job->past > old) return 0;
    if (!in[KEY].rank != !in[VALUE].rank) return 0;
    for (int i = KEY; in[KEY].rank && i <= VALUE; i++)
        if (!has_shape(&in[i], 3, n_batch, n_rows, n_kv * job->dim)) return 0;
    if (!job->op->has_rotation) return 1;
    return 2 * job->half <= job->dim && has_shape(&in[COS], 2, in[COS].dims[0], job->half, 0)
           && has_shape(&in[SIN], 2, in[COS].dims[0], job->half, 0)
           && (!in[POSITIONS].rank || has_shape(&in[POSITIONS], 2, n_batch, n_rows, 0));
}

static int is_bias_fitting(const Job *job, const Array *bias)
{
    const int64_t *dims = bias->dims;
    return !bias->rank
           || (bias->rank == 4 && (dims[0] == 1 || dims[0] == job->n_batch) && (dims[1] == 1 || dims[1] == job->op->n_heads)
               && dims[2] == job->n_rows && dims[3] == job->past + job->n_rows);
}

static Status check(const Job *job, const Array *in)
{
    const Attention *op = job->op;
    int is_right = in[QUERY].rank == 3 && job->dim % LANES == 0 && in[LENGTHS].dims[0] == job->n_batch
                   && is_fitting(job, in) && is_bias_fitting(job, &in[BIAS]);
    const int32_t *lengths = in[LENGTHS].data;
    for (int64_t b = 1; is_right && b < job->n_batch; b++) is_right = lengths[b] == lengths[0];
    is_right = is_right && in[QUERY].dims[2] == (in[KEY].rank ? op->n_heads : op->n_heads + 2 * op->n_kv) * job->dim;
    for (int64_t i = 0; is_right && job->half && i < job->n_batch * job->n_rows; i++) {
        const int64_t position = position_of(job, i / job->n_rows, i % job->n_rows);
        is_right = position >= 0 && position < in[COS].dims[0];
    }
    return is_right ? NULL : failure(op->api, "RowsAttention: shapes, lengths or positions that do not fit");
}

static void fill(Job *job, const Array *in)
{
    const Attention *op = job->op;
    job->n_batch = in[QUERY].dims[0];
    job->n_rows = in[QUERY].dims[1];
    job->packed = in[QUERY].dims[2];
    job->dim = in[PAST_KEY].dims[3];
    job->past = in[LENGTHS].dims[0] ? *(const int32_t *)in[LENGTHS].data + 1 - job->n_rows : 0;
    job->query = in[QUERY].data;
    job->key = in[KEY].rank ? in[KEY].data : job->query + op->n_heads * job->dim;
    job->value = in[KEY].rank ? in[VALUE].data : job->key + op->n_kv * job->dim;
    job->key_stride = in[KEY].rank ? op->n_kv * job->dim : job->packed;
    job->half = op->has_rotation ? in[COS].dims[1] : 0;
    job->cos = in[COS].data;
    job->sin = in[SIN].data;
    job->positions = in[POSITIONS].data;
    job->bias = in[BIAS].data;
    if (job->bias) {
        const int64_t one_head = in[BIAS].dims[2] * in[BIAS].dims[3];
        job->bias_head = in[BIAS].dims[1] > 1 ? one_head : 0;
        job->bias_batch = in[BIAS].dims[0] > 1 ? one_head * in[BIAS].dims[1] : 0;
    }
}

/* What is cached, where past and present are two buffers. */
static void copy_past(const Job *job, const float *from, float *to, int64_t capacity)
{
    if (from == to) return;
    for (int64_t h = 0; h < job->n_batch * job->op->n_kv; h++)
        memcpy(to + h * job->capacity * job->dim, from + h * capacity * job->dim, sizeof(float) * job->past * job->dim);
}

static Status compute(void *kernel, void *context)
{
    const Attention *op = kernel;
    Array in[N_INPUTS];
    Job job = {.op = op};
    for (size_t i = 0; i < N_INPUTS; i++) TRY(read(op->api, context, i, &in[i]));
    fill(&job, in);
    TRY(check(&job, in));
    const int64_t total = job.past + job.n_rows, old = in[PAST_KEY].dims[2];
    job.capacity = old > total ? old : total;
    const int64_t cache[] = {job.n_batch, op->n_kv, job.capacity, job.dim};
    const int64_t out[] = {job.n_batch, job.n_rows, op->n_heads * job.dim};
    TRY(write(op->api, context, OUT, out, 3, &job.out));
    TRY(write(op->api, context, PRESENT_KEY, cache, 4, &job.keys));
    TRY(write(op->api, context, PRESENT_VALUE, cache, 4, &job.values));
    copy_past(&job, in[PAST_KEY].data, job.keys, old);
    copy_past(&job, in[PAST_VALUE].data, job.values, old);
    for (int64_t i = 0; i < job.n_batch * job.n_rows; i++) store(&job, i / job.n_rows, i % job.n_rows);
    job.scratch = zeroed_memory(sizeof(float) * scratch_size(&job) * op->pieces);
    if (!job.scratch) return failure(op->api, "RowsAttention: no memory for the scores");
    Status status = NULL;
    if (job.n_batch * job.n_rows * op->n_heads * total * job.dim < SERIAL_WORK)
        for (int64_t piece = 0; piece < op->pieces; piece++) run_piece(&job, piece);
    else
        status = CALL(op->api, F_PARALLEL, context, run_piece, (size_t)op->pieces, (size_t)0, (void *)&job);
    free(job.scratch);
    return status;
}

static const char *name(const void *op) { (void)op; return "RowsAttention"; }
static int input_type(const void *op, size_t i)
{
    (void)op;
    return i == LENGTHS || i == TOTAL ? INT32 : i == POSITIONS ? INT64 : FLOAT;
}
static size_t n_inputs(const void *op) { (void)op; return N_INPUTS; }
static size_t n_outputs(const void *op) { (void)op; return N_OUTPUTS; }
static int input_kind(const void *op, size_t i)
{
    (void)op;
    return i == KEY || i == VALUE || i >= COS ? OPTIONAL : REQUIRED;
}

const Operator ROWS_ATTENTION = OPERATOR(name, input_type, n_inputs, n_outputs, input_kind, all_zero, create, compute, destroy);

/* What our operators share: the part of ONNX Runtime's C interface that they use.
 *
 * The interface is a table of functions, which releases only append to; it is declared by places in that table
 * (onnxruntime_c_api.h; 17 is the first version with ParallelFor) and by the members of OrtCustomOp in their order.
 */

#ifndef EDGESPEC_OPERATORS_H
#define EDGESPEC_OPERATORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API_VERSION 17
#define ZEROED_SPARE 2048 /* bytes behind what was asked for, so that fetching ahead stays inside */

enum { F_STATUS = 0, F_NEW_DOMAIN = 26, F_DOMAIN_ADD = 27, F_ADD_DOMAIN = 28, F_DATA = 51, F_RANK = 61, F_DIMS = 62, F_COUNT = 64,
       F_SHAPE = 65, F_FLOAT = 85, F_INT = 86, F_INPUT = 90, F_OUTPUT = 91, F_FREE_STATUS = 93, F_FREE_SHAPE = 99,
       F_N_INPUTS = 230, F_CONSTANT = 249, F_PARALLEL = 274 };
enum { FLOAT = 1, UINT8 = 2, INT32 = 6, INT64 = 7 };
enum { REQUIRED = 0, OPTIONAL = 1 };
enum { MOST_DIMS = 8 };

typedef const void *const *Api;
typedef void *Status; /* NULL: all is well */
typedef struct { Api (*get_api)(uint32_t version); const char *(*version)(void); } ApiBase;

#define CALL(api, place, ...) ((Status(*)())(api)[place])(__VA_ARGS__)
#define TRY(call) do { Status status_ = (call); if (status_) return status_; } while (0)

static inline Status failure(Api api, const char *text)
{
    return CALL(api, F_STATUS, 1, text);
}

/* Aligned zeros with ZEROED_SPARE bytes behind them; NULL where there is no memory. */
static inline void *zeroed_memory(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes + ZEROED_SPARE)) return NULL;
    memset(memory, 0, bytes + ZEROED_SPARE);
    return memory;
}

typedef struct {
    uint32_t version;
    void *(*create_old)(const void *, Api, const void *);
    const char *(*name)(const void *);
    const char *(*provider)(const void *);
    int (*input_type)(const void *, size_t);
    size_t (*n_inputs)(const void *);
    int (*output_type)(const void *, size_t);
    size_t (*n_outputs)(const void *);
    void (*compute_old)(void *, void *);
    void (*destroy)(void *);
    int (*input_kind)(const void *, size_t);
    int (*output_kind)(const void *, size_t);
    int (*memory)(const void *, size_t);
    int (*least_inputs)(const void *);
    int (*are_inputs_alike)(const void *);
    int (*least_outputs)(const void *);
    int (*are_outputs_alike)(const void *);
    Status (*create)(const void *, Api, const void *, void **);
    Status (*compute)(void *, void *);
    Status (*infer_shape)(const void *, void *);
    int (*start)(const void *);
    int (*end)(const void *);
    void *unused[4];
} Operator;

/* What is the same for all of them; operators.c has the functions. Outputs are floats. */
int all_float(const void *op, size_t index);
int all_zero(const void *op, size_t index);
int one(const void *op);
const char *default_provider(const void *op);
void *no_kernel(const void *op, Api api, const void *info);
void no_compute(void *kernel, void *context);

#define OPERATOR(name, input_type, n_inputs, n_outputs, input_kind, output_kind, create, compute, destroy)                \
    {API_VERSION, no_kernel, name, default_provider, input_type, n_inputs, all_float, n_outputs, no_compute, destroy,     \
     input_kind, output_kind, all_zero, one, one, one, one, create, compute, NULL, NULL, NULL, {0}}

extern const Operator ROWS_PRODUCT, ROWS_ATTENTION;

#endif

/* The library's one entry, which ONNX Runtime calls when a session registers it. */

#include "operators.h"

int all_float(const void *op, size_t index) { (void)op; (void)index; return FLOAT; }
int all_zero(const void *op, size_t index) { (void)op; (void)index; return 0; }
int one(const void *op) { (void)op; return 1; }
const char *default_provider(const void *op) { (void)op; return NULL; }
void *no_kernel(const void *op, Api api, const void *info) { (void)op; (void)api; (void)info; return NULL; }
void no_compute(void *kernel, void *context) { (void)kernel; (void)context; }

__attribute__((visibility("default"))) Status RegisterCustomOps(void *options, const ApiBase *base)
{
    Api api = base->get_api(API_VERSION);
    void *domain = NULL;
    if (!api) return NULL; /* an older runtime: it will say that it does not know the operators */
    TRY(CALL(api, F_NEW_DOMAIN, "edgespec", &domain));
    TRY(CALL(api, F_DOMAIN_ADD, domain, &ROWS_PRODUCT));
    TRY(CALL(api, F_DOMAIN_ADD, domain, &ROWS_ATTENTION));
    return CALL(api, F_ADD_DOMAIN, options, domain);
}

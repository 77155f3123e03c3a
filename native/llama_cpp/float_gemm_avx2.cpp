#if defined(__x86_64__)

#include "vec16_avx2.h"

#include "float_gemm_tile.h"

namespace attested {

void float_gemm_avx2(const FloatProduct & product) { multiply(product); }

} // namespace attested

#endif

// Products with AVX-512 and VNNI: four bytes are multiplied and added up in 32 bits, in vectors of 512.
#include "gemm_512.h"

#include "gemm_tiles.h"

namespace attested {

void gemm_avx512(const Product & product) { dispatch<Small, Large>(product); }

} // namespace attested

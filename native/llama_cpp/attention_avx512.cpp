#if defined(__x86_64__)

#include "vec16_avx512.h"

#include "functions_simd.h"

#include "attention_tile.h"

namespace attested {

void attention_avx512(const Attention & work, const Tile & tile, const Workspace & memory) { attend(work, tile, memory); }

} // namespace attested

#endif

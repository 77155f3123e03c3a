// Which integer units a kernel runs on. Every variant gives the same bits; they differ in speed alone.
#pragma once

namespace attested {

// In the order in which they are preferred: the last one that the processor and the operating system offer is used.
// `plain` is C++ without intrinsics, the definition of the arithmetic: for tests.
enum class Variant { plain, avx2, avxvnni, avx512, amx };

constexpr int kVariants = 5;

// Name as in receipts and logs: "plain", "avx2", "avx-vnni", "avx512-vnni", "amx-int8".
const char * name(Variant variant);

// Whether this processor and this kernel can run it. `amx` asks the kernel for the tile registers, once.
bool available(Variant variant);

// The one of that name, where this processor has it.
bool named(const char * name, Variant & found);

// The one in use; may change between two evaluations only (attested_use_variant, for tests and for the proof of a build).
Variant variant();

} // namespace attested

// Functions that the C library rounds differently from version to version and from processor to processor, made of +, *, /,
// fma and integer operations alone: one definition, the same bits everywhere. The linker's --wrap puts them in place of the
// C library's in ggml-base, ggml-cpu and llama (attested.cmake).
//
// Floats are computed in binary64 and rounded once: at most 0.51 units in the last place off, over the whole range, so that
// what a compiler folds for a constant argument is the same but in rare cases. Of the functions of doubles
// exp, exp2, log and log2 are within 2 units, pow within 16. tests/integration/test_engine_functions.py measures all of them.
#pragma once

#include <cstdint>

namespace attested {

float expf(float x);
float exp2f(float x);
float expm1f(float x);
float logf(float x);
float log2f(float x);
float log1pf(float x);
float sinf(float x);
float cosf(float x);
float tanhf(float x);
float erff(float x);
float powf(float x, float y);
double exp(double x);
double exp2(double x);
double log(double x);
double log2(double x);
double pow(double x, double y);

// log of the sum of e^x over `count` logits, in binary64: the largest is taken out, then they are added in order.
double log_sum_exp(const float * logits, int64_t count);

} // namespace attested

// What Python calls of functions.h: the log probabilities of an answer, and each function by its name for the tests.

#include "functions.h"

#include <cstdint>
#include <cstring>

#include "ggml-backend.h"

namespace {

struct OfFloat {
    const char * name;
    float (*function)(float);
};
constexpr OfFloat kOfFloat[] = {
    {"expf", attested::expf}, {"exp2f", attested::exp2f}, {"expm1f", attested::expm1f}, {"logf", attested::logf},
    {"log2f", attested::log2f}, {"log1pf", attested::log1pf}, {"sinf", attested::sinf}, {"cosf", attested::cosf},
    {"tanhf", attested::tanhf}, {"erff", attested::erff},
};

struct OfDouble {
    const char * name;
    double (*function)(double);
};
constexpr OfDouble kOfDouble[] = {
    {"exp", attested::exp}, {"exp2", attested::exp2}, {"log", attested::log}, {"log2", attested::log2},
};

} // namespace

extern "C" {

GGML_BACKEND_API double attested_log_sum_exp(const float * logits, int64_t count);
double attested_log_sum_exp(const float * logits, int64_t count) { return attested::log_sum_exp(logits, count); }

// out[i] = f(x[i]), or f(x[i], y[i]) for "powf". False where no function of floats has that name.
GGML_BACKEND_API bool attested_function_of_floats(const char * name, int64_t count, const float * x, const float * y, float * out);
bool attested_function_of_floats(const char * name, int64_t count, const float * x, const float * y, float * out) {
    for (const OfFloat & one : kOfFloat) {
        if (strcmp(one.name, name) == 0) {
            for (int64_t i = 0; i < count; ++i) {
                out[i] = one.function(x[i]);
            }
            return true;
        }
    }
    for (int64_t i = 0; strcmp(name, "powf") == 0 && i < count; ++i) {
        out[i] = attested::powf(x[i], y[i]);
    }
    return strcmp(name, "powf") == 0;
}

// The same of doubles, with "pow".
GGML_BACKEND_API bool attested_function_of_doubles(const char * name, int64_t count, const double * x, const double * y, double * out);
bool attested_function_of_doubles(const char * name, int64_t count, const double * x, const double * y, double * out) {
    for (const OfDouble & one : kOfDouble) {
        if (strcmp(one.name, name) == 0) {
            for (int64_t i = 0; i < count; ++i) {
                out[i] = one.function(x[i]);
            }
            return true;
        }
    }
    for (int64_t i = 0; strcmp(name, "pow") == 0 && i < count; ++i) {
        out[i] = attested::pow(x[i], y[i]);
    }
    return strcmp(name, "pow") == 0;
}

} // extern "C"

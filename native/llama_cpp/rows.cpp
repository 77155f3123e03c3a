// A single row of queries takes attention's way of several rows.
//
// With several threads ggml splits the tokens that a single row looks at among them, and adds up in another order than for
// several rows: a row would differ in company. attested.cmake puts this in front of ggml_compute_forward_flash_attn_ext.
#include "ggml-cpu-impl.h"

extern "C" {

void __real_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * out);
void __wrap_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * out);

void __wrap_ggml_compute_forward_flash_attn_ext(const ggml_compute_params * params, ggml_tensor * out) {
    const ggml_tensor * queries = out->src[0];
    ggml_compute_params whole = *params;
    // With fewer heads than threads some would have nothing to do: there ggml may split, and the self-test says what follows.
    if (queries->ne[1] == 1 && queries->ne[3] == 1 && queries->ne[2] >= params->nth) {
        whole.use_ref = true; // of ggml's ways the one that neither splits nor tiles
    }
    __real_ggml_compute_forward_flash_attn_ext(&whole, out);
}

} // extern "C"

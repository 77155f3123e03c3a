# Included by CMake at the end of llama.cpp's `project("ggml")` (-DCMAKE_PROJECT_ggml_INCLUDE=.../rows.cmake): adds the
# products of rows.cpp to the target ggml-cpu, once it exists. No file of llama.cpp is changed.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" AND UNIX AND NOT APPLE)
  set(ROWS_SOURCE "${CMAKE_CURRENT_LIST_DIR}/rows.cpp")
  function(rows_add)
    target_sources(ggml-cpu PRIVATE "${ROWS_SOURCE}")
    target_link_options(ggml-cpu PRIVATE
      "LINKER:--wrap=ggml_compute_forward_mul_mat_tiled" "LINKER:--wrap=ggml_compute_forward_flash_attn_ext")
  endfunction()
  cmake_language(DEFER CALL rows_add)
endif()

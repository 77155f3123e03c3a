# Included by CMake at the end of llama.cpp's `project("ggml")` (-DCMAKE_PROJECT_ggml_INCLUDE=.../attested.cmake): adds the
# kernels of this folder to the target ggml-cpu, once it exists. No file of llama.cpp is changed.
#
# ggml's own code is compiled for one fixed instruction set, x86-64-v3. A file whose name ends in the name of a variant is
# compiled for that variant's instructions as well, and only called where the processor has them (variants.cpp). Such files
# must define nothing that the linker may merge with the same thing of another file (no inline functions or templates of a
# header with external linkage): the copy compiled for the newer processor could be the one that is kept.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" AND UNIX AND NOT APPLE)
  set(ATTESTED_DIR "${CMAKE_CURRENT_LIST_DIR}")
  set(ATTESTED_FLAGS_avxvnni -mavxvnni)
  set(ATTESTED_FLAGS_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512)
  set(ATTESTED_FLAGS_amx ${ATTESTED_FLAGS_avx512} -mamx-tile -mamx-int8)
  function(attested_add)
    file(GLOB sources CONFIGURE_DEPENDS "${ATTESTED_DIR}/*.cpp")
    target_sources(ggml-cpu PRIVATE ${sources})
    foreach(variant avxvnni avx512 amx)
      file(GLOB files CONFIGURE_DEPENDS "${ATTESTED_DIR}/*_${variant}.cpp")
      foreach(file ${files})
        set_property(SOURCE "${file}" TARGET_DIRECTORY ggml-cpu APPEND PROPERTY COMPILE_OPTIONS ${ATTESTED_FLAGS_${variant}})
      endforeach()
    endforeach()
    target_compile_options(ggml-cpu PRIVATE -ffp-contract=off -fno-fast-math)
    target_link_options(ggml-cpu PRIVATE
      "LINKER:--wrap=ggml_compute_forward_mul_mat_tiled" "LINKER:--wrap=ggml_compute_forward_flash_attn_ext")
  endfunction()
  cmake_language(DEFER CALL attested_add)
endif()

# Included by CMake at the end of llama.cpp's `project("ggml")` (-DCMAKE_PROJECT_ggml_INCLUDE=.../attested.cmake): adds the
# kernels of this folder to the target ggml-cpu, once it exists. No file of llama.cpp is changed.
#
# ggml's own code is compiled for one fixed instruction set, x86-64-v3. A file whose name ends in the name of a variant is
# compiled for that variant's instructions as well, and only called where the processor has them (variants.cpp). Such files
# must define nothing that the linker may merge with the same thing of another file (no inline functions or templates of a
# header with external linkage): the copy compiled for the newer processor could be the one that is kept.

# The shared libraries of the engine need none of these targets.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "llama.cpp's utilities for its programs" FORCE)

# When everything is declared: what is compiled in vain is left out, and code that runs once for a model is optimised less.
# Nothing here changes a result: no option that lets a compiler reorder floating point is given anywhere.
function(attested_finish)
  if(TARGET vendor-hash)
    set_property(TARGET vendor-hash PROPERTY EXCLUDE_FROM_ALL TRUE)
  endif()
  if(NOT TARGET llama OR MSVC)
    return()
  endif()
  target_compile_options(llama PRIVATE $<$<CONFIG:Release>:-O1>)
  foreach(name batch context grammar graph kv-cache memory-recurrent sampler vocab)
    set_property(SOURCE "${ATTESTED_LLAMA}/llama-${name}.cpp" TARGET_DIRECTORY llama
      APPEND PROPERTY COMPILE_OPTIONS $<$<CONFIG:Release>:-O2>)
  endforeach()
  set_property(SOURCE "${ATTESTED_LLAMA}/unicode.cpp" TARGET_DIRECTORY llama
    APPEND PROPERTY COMPILE_OPTIONS $<$<CONFIG:Release>:-O2>)
  if(COMMAND attested_functions)
    attested_functions(llama)
  endif()
endfunction()
get_filename_component(ATTESTED_LLAMA "${CMAKE_CURRENT_SOURCE_DIR}/../src" ABSOLUTE)
set(ATTESTED_LLAMA "${ATTESTED_LLAMA}" CACHE INTERNAL "")
cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL attested_finish)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" AND UNIX AND NOT APPLE)
  set(ATTESTED_DIR "${CMAKE_CURRENT_LIST_DIR}" CACHE INTERNAL "")
  set(ATTESTED_FLAGS_avxvnni -mavxvnni)
  set(ATTESTED_FLAGS_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512
    -Wno-maybe-uninitialized -Wno-uninitialized) # of GCC 12's own header
  set(ATTESTED_FLAGS_amx ${ATTESTED_FLAGS_avx512} -mamx-tile -mamx-int8)
  # The C library's functions whose results it may choose to round otherwise; those of functions.cpp are called instead.
  set(ATTESTED_FUNCTIONS expf exp2f expm1f logf log2f log1pf sinf cosf sincosf tanhf erff powf exp exp2 log log2 pow
    CACHE INTERNAL "")
  function(attested_functions target)
    set(source "${ATTESTED_DIR}/functions.cpp")
    target_sources(${target} PRIVATE "${source}")
    set_property(SOURCE "${source}" TARGET_DIRECTORY ${target} PROPERTY COMPILE_OPTIONS -O2 -mavx2 -mfma -ffp-contract=off)
    foreach(name ${ATTESTED_FUNCTIONS})
      target_compile_options(${target} PRIVATE -fno-builtin-${name})
      target_link_options(${target} PRIVATE "LINKER:--wrap=${name}")
    endforeach()
  endfunction()
  function(attested_add)
    attested_functions(ggml-base)
    attested_functions(ggml-cpu)
    file(GLOB sources CONFIGURE_DEPENDS "${ATTESTED_DIR}/*.cpp")
    list(FILTER sources EXCLUDE REGEX "/functions\\.cpp$")
    target_sources(ggml-cpu PRIVATE ${sources})
    foreach(variant avxvnni avx512 amx)
      file(GLOB files CONFIGURE_DEPENDS "${ATTESTED_DIR}/*_${variant}.cpp")
      foreach(file ${files})
        set_property(SOURCE "${file}" TARGET_DIRECTORY ggml-cpu APPEND PROPERTY COMPILE_OPTIONS ${ATTESTED_FLAGS_${variant}})
      endforeach()
    endforeach()
    # Kernels of llama.cpp that are switched off (GGML_CPU_REPACK, AMX, tiles): other orders of additions, and long to compile.
    get_target_property(own ggml-cpu SOURCES)
    list(FILTER own EXCLUDE REGEX "/(repack|hbm|amx/amx|amx/mmq|tiled/tiled|tiled/tiled-kernel)\\.(cpp|h)$")
    set_property(TARGET ggml-cpu PROPERTY SOURCES ${own})
    target_compile_options(ggml-cpu PRIVATE -ffp-contract=off -fno-fast-math)
    target_link_options(ggml-cpu PRIVATE
      "LINKER:--wrap=ggml_compute_forward_mul_mat_tiled" "LINKER:--wrap=ggml_compute_forward_mul_mat_id_tiled"
      "LINKER:--wrap=ggml_tiled_wdata_size" "LINKER:--wrap=ggml_compute_forward_flash_attn_ext"
      "LINKER:--wrap=ggml_graph_plan")
  endfunction()
  cmake_language(DEFER CALL attested_add)
endif()

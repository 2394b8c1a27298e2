# CUDA sources, compiled by nvcc with the flags of nvcc_flags.txt, for a CUDA build of libtorch. No toolkit beyond nvcc
# itself is needed, and CMake's own CUDA language, which wants one, is not used.
#
# Sets PHALANX_GPU_KERNELS: whether there is an nvcc, of libtorch's major version, that knows all architectures.

option(PHALANX_NVCC_KERNELS "Compile Phalanx's GPU kernels where there is an nvcc" ON)
set(PHALANX_GPU_KERNELS OFF)
if(PHALANX_TORCH_CUDA AND PHALANX_NVCC_KERNELS)
  set(_phalanx_nvcc_version "")
  if(PHALANX_NVCC)
    execute_process(COMMAND ${PHALANX_NVCC} --version OUTPUT_VARIABLE _phalanx_nvcc_output ERROR_QUIET)
    if(_phalanx_nvcc_output MATCHES "release ([0-9]+\\.[0-9]+)")
      set(_phalanx_nvcc_version ${CMAKE_MATCH_1})
    endif()
  endif()
  if(NOT _phalanx_nvcc_version)
    set(_phalanx_nvcc_missing "no nvcc")
  elseif(NOT _phalanx_nvcc_version MATCHES "^${_phalanx_cuda_major}\\.")
    set(_phalanx_nvcc_missing "nvcc ${_phalanx_nvcc_version}, but libtorch's CUDA is ${_phalanx_cuda_major}")
  elseif(_phalanx_nvcc_version VERSION_LESS 12.8)
    set(_phalanx_nvcc_missing "nvcc ${_phalanx_nvcc_version} does not know sm_100: 12.8 does")
  else()
    set(PHALANX_GPU_KERNELS ON)
    message(STATUS "Phalanx: GPU kernels by nvcc ${_phalanx_nvcc_version}")
  endif()
  if(NOT PHALANX_GPU_KERNELS)
    message(STATUS "Phalanx: ${_phalanx_nvcc_missing}: operators of libtorch in place of Phalanx's own GPU kernels")
  endif()
endif()

# Adds a .cu file of this folder to a target. What ptxas says of each kernel's registers goes to <file>.ptxas.txt.
function(phalanx_cuda_source target file)
  file(STRINGS ${PROJECT_SOURCE_DIR}/cmake/nvcc_flags.txt flags)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${file}.o)
  set(log ${CMAKE_CURRENT_BINARY_DIR}/${file}.ptxas.txt)
  add_custom_command(OUTPUT ${object} BYPRODUCTS ${log}
    COMMAND sh -c [[log=$1; shift; "$@" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }]] sh ${log}
            ${PHALANX_NVCC} -ccbin ${CMAKE_CXX_COMPILER} ${flags} -I${PROJECT_SOURCE_DIR} -MD -MF ${object}.d
            -c ${CMAKE_CURRENT_SOURCE_DIR}/${file} -o ${object}
    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${file} ${PROJECT_SOURCE_DIR}/cmake/nvcc_flags.txt
    DEPFILE ${object}.d COMMENT "Compiling ${file} with nvcc" VERBATIM)
  set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  target_sources(${target} PRIVATE ${object})
endfunction()

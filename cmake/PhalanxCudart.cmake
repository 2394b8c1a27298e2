# CUDA's runtime, for a CUDA build of libtorch. Sets PHALANX_CUDA_INCLUDE (with cuda_runtime_api.h) and
# PHALANX_CUDART (libcudart.so of the major version that libtorch itself loads).
#
# Looked for, unless given: beside torch (the nvidia-* wheels of a Python environment), the tree of the nvcc on the
# path, CUDA_HOME, /usr/local/cuda. A toolkit is not needed: the nvidia-cuda-runtime wheel is enough.

file(STRINGS ${PHALANX_TORCH_ROOT}/lib/libc10_cuda.so _phalanx_cudart REGEX "^libcudart\\.so\\.[0-9]+$")
list(GET _phalanx_cudart 0 _phalanx_cudart)
string(REGEX REPLACE ".*\\." "" _phalanx_cuda_major "${_phalanx_cudart}")

set(_phalanx_cuda_trees
    ${PHALANX_TORCH_ROOT}/../nvidia/cu${_phalanx_cuda_major} ${PHALANX_TORCH_ROOT}/../nvidia/cuda_runtime)
find_program(PHALANX_NVCC nvcc)
if(PHALANX_NVCC)
  # What is on the path may be a wrapper: nvcc itself knows its tree.
  execute_process(COMMAND ${PHALANX_NVCC} -dryrun -x cu /dev/null ERROR_VARIABLE _phalanx_dryrun OUTPUT_QUIET)
  if(_phalanx_dryrun MATCHES "TOP=([^\n]+)")
    list(APPEND _phalanx_cuda_trees ${CMAKE_MATCH_1} ${CMAKE_MATCH_1}/targets/${CMAKE_SYSTEM_PROCESSOR}-linux)
  endif()
endif()
list(APPEND _phalanx_cuda_trees $ENV{CUDA_HOME} /usr/local/cuda-${_phalanx_cuda_major} /usr/local/cuda)

find_path(PHALANX_CUDA_INCLUDE cuda_runtime_api.h PATHS ${_phalanx_cuda_trees} PATH_SUFFIXES include NO_DEFAULT_PATH)
find_file(PHALANX_CUDART ${_phalanx_cudart} PATHS ${PHALANX_CUDA_LIB} ${_phalanx_cuda_trees}
          PATH_SUFFIXES lib64 lib NO_DEFAULT_PATH)
if(NOT PHALANX_CUDA_INCLUDE OR NOT PHALANX_CUDART)
  string(REPLACE ";" "\n  " _phalanx_cuda_trees "${_phalanx_cuda_trees}")
  message(FATAL_ERROR
    "libtorch in ${PHALANX_TORCH_ROOT} is a CUDA build: CUDA's runtime is needed, too. Found: "
    "cuda_runtime_api.h '${PHALANX_CUDA_INCLUDE}', ${_phalanx_cudart} '${PHALANX_CUDART}'. Looked in\n  ${_phalanx_cuda_trees}\n"
    "Install the nvidia-cuda-runtime wheel beside torch, or pass -DPHALANX_CUDA_INCLUDE=<folder with cuda_runtime_api.h> "
    "and -DPHALANX_CUDART=<path of ${_phalanx_cudart}>.")
endif()

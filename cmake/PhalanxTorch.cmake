# Phalanx::torch: an imported target over torch's include/ and lib/ folders.
#
# find_package(Torch) is not used because the config file of torch's CUDA wheels fails to configure without a
# full CUDA toolkit; the folders alone are enough, for CPU and CUDA builds alike.
#
# Search order: PHALANX_TORCH_DIR (cache variable or environment), the active Python environment, .venv.

set(_phalanx_torch_candidates)
if(PHALANX_TORCH_DIR)
  list(APPEND _phalanx_torch_candidates ${PHALANX_TORCH_DIR})
elseif(DEFINED ENV{PHALANX_TORCH_DIR} AND NOT "$ENV{PHALANX_TORCH_DIR}" STREQUAL "")
  list(APPEND _phalanx_torch_candidates $ENV{PHALANX_TORCH_DIR})
else()
  foreach(_python python3 ${CMAKE_CURRENT_LIST_DIR}/../.venv/bin/python)
    # find_spec does not import torch, which would take over a second.
    execute_process(
      COMMAND ${_python} -c
              "import importlib.util as u, os; s = u.find_spec('torch'); print(os.path.dirname(s.origin) if s else '')"
      OUTPUT_VARIABLE _found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _status)
    if(_status EQUAL 0 AND _found)
      list(APPEND _phalanx_torch_candidates ${_found})
    endif()
  endforeach()
endif()

set(PHALANX_TORCH_ROOT "")
foreach(_root ${_phalanx_torch_candidates})
  if(EXISTS ${_root}/include/ATen/core/Tensor.h AND EXISTS ${_root}/lib/libtorch_cpu.so)
    file(STRINGS ${_root}/include/torch/headeronly/version.h _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
    if(NOT _lines)
      file(STRINGS ${_root}/include/torch/csrc/api/include/torch/version.h _lines
           REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
    endif()
    string(REGEX REPLACE ".*VERSION_MAJOR ([0-9]+).*VERSION_MINOR ([0-9]+).*VERSION_PATCH ([0-9]+).*" "\\1.\\2.\\3"
           _version "${_lines}")
    if(_version VERSION_GREATER_EQUAL 2.11 AND _version VERSION_LESS 2.14)
      set(PHALANX_TORCH_ROOT ${_root})
      set(PHALANX_TORCH_VERSION ${_version})
      break()
    endif()
    message(STATUS "Phalanx: passing over torch ${_version} in ${_root}: 2.11 to 2.13 is needed")
  endif()
endforeach()
if(NOT PHALANX_TORCH_ROOT)
  message(FATAL_ERROR
    "Phalanx needs libtorch 2.11 to 2.13. Looked in: '${_phalanx_torch_candidates}'.\n"
    "Run scripts/bootstrap.sh (makes .venv with torch 2.13.0), or pass -DPHALANX_TORCH_DIR=<folder with include/ and lib/>.")
endif()

set(PHALANX_TORCH_CUDA OFF)
if(EXISTS ${PHALANX_TORCH_ROOT}/lib/libtorch_cuda.so)
  set(PHALANX_TORCH_CUDA ON)
endif()
message(STATUS "Phalanx: torch ${PHALANX_TORCH_VERSION} in ${PHALANX_TORCH_ROOT} (CUDA build: ${PHALANX_TORCH_CUDA})")

set(_lib ${PHALANX_TORCH_ROOT}/lib)
add_library(phalanx_torch INTERFACE)
add_library(Phalanx::torch ALIAS phalanx_torch)
target_include_directories(phalanx_torch SYSTEM INTERFACE
  $<BUILD_INTERFACE:${PHALANX_TORCH_ROOT}/include>
  $<BUILD_INTERFACE:${PHALANX_TORCH_ROOT}/include/torch/csrc/api/include>)
target_link_libraries(phalanx_torch INTERFACE
  $<BUILD_INTERFACE:${_lib}/libtorch_cpu.so> $<BUILD_INTERFACE:${_lib}/libc10.so>)
target_link_options(phalanx_torch INTERFACE $<BUILD_INTERFACE:-Wl,-rpath,${_lib}>)
if(PHALANX_TORCH_CUDA)
  # Nothing refers to libtorch_cuda by symbol, yet loading it is what registers the CUDA kernels.
  target_link_libraries(phalanx_torch INTERFACE
    $<BUILD_INTERFACE:${_lib}/libc10_cuda.so>
    $<BUILD_INTERFACE:-Wl,--push-state,--no-as-needed,--allow-shlib-undefined>
    $<BUILD_INTERFACE:${_lib}/libtorch_cuda.so>
    $<BUILD_INTERFACE:-Wl,--pop-state>)
endif()

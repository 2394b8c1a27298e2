# Phalanx::torch: a target of our own over torch's include/ and lib/ folders.
#
# find_package(Torch) is not used because the config file of torch's CUDA wheels fails to configure without a
# full CUDA toolkit; the folders alone are enough, for CPU and CUDA builds alike.

include(${CMAKE_CURRENT_LIST_DIR}/PhalanxTorchSearch.cmake)

# Gives a target torch's headers and libraries: ours when Phalanx is built, the imported one when it is used installed.
function(phalanx_use_torch target)
  set(lib ${PHALANX_TORCH_ROOT}/lib)
  target_include_directories(${target} SYSTEM INTERFACE
    $<BUILD_INTERFACE:${PHALANX_TORCH_ROOT}/include>
    $<BUILD_INTERFACE:${PHALANX_TORCH_ROOT}/include/torch/csrc/api/include>)
  target_link_libraries(${target} INTERFACE
    $<BUILD_INTERFACE:${lib}/libtorch_cpu.so> $<BUILD_INTERFACE:${lib}/libc10.so>)
  target_link_options(${target} INTERFACE $<BUILD_INTERFACE:-Wl,-rpath,${lib}>)
  # at::parallel_for is a header: without OpenMP it compiles to a plain loop. The team is libtorch's own, so its libgomp
  # is linked, under whatever name this build of torch carries it, and no second one.
  file(STRINGS ${PHALANX_TORCH_ROOT}/include/ATen/Config.h uses_openmp REGEX "^#define AT_PARALLEL_OPENMP 1")
  if(uses_openmp)
    target_compile_options(${target} INTERFACE -fopenmp)
  endif()
  file(GLOB gomp ${lib}/libgomp*.so* ${PHALANX_TORCH_ROOT}/../torch.libs/libgomp*.so*)
  if(uses_openmp AND gomp)
    list(GET gomp 0 gomp)
    target_link_libraries(${target} INTERFACE $<BUILD_INTERFACE:${gomp}>)
  elseif(uses_openmp)
    target_link_options(${target} INTERFACE -fopenmp)
  endif()
  if(PHALANX_TORCH_CUDA)
    # Nothing refers to libtorch_cuda by symbol, yet loading it is what registers the CUDA kernels.
    target_link_libraries(${target} INTERFACE
      $<BUILD_INTERFACE:${lib}/libc10_cuda.so> $<BUILD_INTERFACE:${PHALANX_CUDART}>
      $<BUILD_INTERFACE:-Wl,--push-state,--no-as-needed,--allow-shlib-undefined>
      $<BUILD_INTERFACE:${lib}/libtorch_cuda.so>
      $<BUILD_INTERFACE:-Wl,--pop-state>)
  endif()
endfunction()

set(PHALANX_TORCH_CUDA OFF)
if(EXISTS ${PHALANX_TORCH_ROOT}/lib/libtorch_cuda.so)
  set(PHALANX_TORCH_CUDA ON)
  include(${CMAKE_CURRENT_LIST_DIR}/PhalanxCudart.cmake)
endif()

# The installed package includes this file too; it has a target already and reports a missing torch in its own way.
if(NOT PHALANX_TORCH_FOR_PACKAGE)
  if(NOT PHALANX_TORCH_ROOT)
    message(FATAL_ERROR
      "Phalanx needs libtorch 2.11 to 2.13. Looked at:\n${PHALANX_TORCH_SEARCHED}"
      "Run scripts/bootstrap.sh (makes .venv with torch 2.13.0), or pass -DPHALANX_TORCH_DIR=<folder with include/ and lib/>.")
  endif()
  if(PHALANX_TORCH_SEARCHED)
    message(STATUS "Phalanx: passed over\n${PHALANX_TORCH_SEARCHED}")
  endif()
  message(STATUS "Phalanx: torch ${PHALANX_TORCH_VERSION} in ${PHALANX_TORCH_ROOT} (CUDA build: ${PHALANX_TORCH_CUDA})")
  add_library(phalanx_torch INTERFACE)
  add_library(Phalanx::torch ALIAS phalanx_torch)
  set_target_properties(phalanx_torch PROPERTIES EXPORT_NAME torch)
  phalanx_use_torch(phalanx_torch)
  # $<TARGET_PROPERTY:PHALANX_LINKS_TORCH> is true for every target that links it, however indirectly.
  set_target_properties(phalanx_torch PROPERTIES
    INTERFACE_PHALANX_LINKS_TORCH ON COMPATIBLE_INTERFACE_BOOL PHALANX_LINKS_TORCH)

  # torch's include folder carries an fmt newer than the system's, and every source that includes torch sees that one.
  # Its compiled part is ours to link; where its version is not the one torch_fmt.cc knows, it is used as headers.
  file(STRINGS ${PHALANX_TORCH_ROOT}/include/fmt/base.h PHALANX_TORCH_FMT REGEX "^#define FMT_VERSION 12")
  if(PHALANX_TORCH_FMT)
    add_library(phalanx_torch_fmt STATIC ${CMAKE_CURRENT_LIST_DIR}/torch_fmt.cc)
    set_target_properties(phalanx_torch_fmt PROPERTIES EXPORT_NAME torch_fmt)
    target_include_directories(phalanx_torch_fmt SYSTEM PRIVATE ${PHALANX_TORCH_ROOT}/include)
    set_property(GLOBAL APPEND PROPERTY PHALANX_LIBRARIES phalanx_torch_fmt)
    target_link_libraries(phalanx_torch INTERFACE phalanx_torch_fmt)
  else()
    target_compile_definitions(phalanx_torch INTERFACE FMT_HEADER_ONLY)
  endif()
endif()

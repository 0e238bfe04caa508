# The CUDA part of libtorch and the cuBLAS that it brings: the target slidedp_torch_cuda. Headers are the toolkit's (same
# major version).
if(SLIDEDP_WITH_CUDA)
  add_library(slidedp_torch_cuda INTERFACE)
  target_include_directories(slidedp_torch_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  # libtorch_cuda's operators register themselves when it is loaded, so it is needed though no symbol of it is used.
  target_link_libraries(slidedp_torch_cuda INTERFACE slidedp_torch ${SLIDEDP_TORCH_ROOT}/lib/libc10_cuda.so
    -Wl,--push-state,--no-as-needed,${SLIDEDP_TORCH_ROOT}/lib/libtorch_cuda.so,--pop-state
    ${SLIDEDP_NVIDIA_LIBRARIES}/libcublasLt.so.13)
  target_link_options(slidedp_torch_cuda INTERFACE -Wl,-rpath,${SLIDEDP_NVIDIA_LIBRARIES})
endif()

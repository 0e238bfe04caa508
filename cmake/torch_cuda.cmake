# The CUDA part of libtorch and the cuBLAS that it brings: the target slidedp_torch_cuda. Headers are the toolkit's (same
# major version).
if(SLIDEDP_WITH_CUDA)
  # cuDNN itself is the one that torch brings; cudnn-frontend is headers only, beside torch.
  get_filename_component(SLIDEDP_CUDNN ${SLIDEDP_TORCH_ROOT}/../nvidia/cudnn ABSOLUTE)
  find_path(SLIDEDP_CUDNN_FRONTEND cudnn_frontend.h PATHS ${SLIDEDP_TORCH_ROOT}/../include NO_DEFAULT_PATH
    DOC "Folder of cudnn-frontend's headers")
  if(NOT SLIDEDP_CUDNN_FRONTEND)
    message(FATAL_ERROR "No cudnn_frontend.h beside ${SLIDEDP_TORCH_ROOT}. Run `make setup`, which installs "
      "nvidia-cudnn-frontend, or set SLIDEDP_CUDNN_FRONTEND.")
  endif()
  add_library(slidedp_cudnn INTERFACE)
  target_include_directories(slidedp_cudnn SYSTEM INTERFACE ${SLIDEDP_CUDNN_FRONTEND} ${SLIDEDP_CUDNN}/include)
  # Its serialization of graphs is not used, and would be most of what compiles.
  target_compile_definitions(slidedp_cudnn INTERFACE CUDNN_FRONTEND_SKIP_JSON_LIB)
  target_link_libraries(slidedp_cudnn INTERFACE ${SLIDEDP_CUDNN}/lib/libcudnn.so.9)
  target_link_options(slidedp_cudnn INTERFACE -Wl,-rpath,${SLIDEDP_CUDNN}/lib)
  list(APPEND CMAKE_INSTALL_RPATH ${SLIDEDP_CUDNN}/lib)
  add_library(slidedp_torch_cuda INTERFACE)
  target_include_directories(slidedp_torch_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  # libtorch_cuda's operators register themselves when it is loaded, so it is needed though no symbol of it is used.
  target_link_libraries(slidedp_torch_cuda INTERFACE slidedp_torch ${SLIDEDP_TORCH_ROOT}/lib/libc10_cuda.so
    -Wl,--push-state,--no-as-needed,${SLIDEDP_TORCH_ROOT}/lib/libtorch_cuda.so,--pop-state
    ${SLIDEDP_NVIDIA_LIBRARIES}/libcublasLt.so.13)
  target_link_options(slidedp_torch_cuda INTERFACE -Wl,-rpath,${SLIDEDP_NVIDIA_LIBRARIES})
endif()

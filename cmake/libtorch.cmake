# libtorch from the PyPI wheel in the project's virtual environment: the imported target slidedp::torch.
#
# Not find_package(Torch): the wheel is a CUDA build, whose package file demands the CUDA toolkit, switches
# CMAKE_CUDA_ARCHITECTURES off and adds its own flags. The CPU part of the library is enough to link against.
set(SLIDEDP_PYTHON ${PROJECT_SOURCE_DIR}/.venv/bin/python CACHE FILEPATH "Python that has torch installed")
if(NOT DEFINED CACHE{SLIDEDP_TORCH_ROOT})
  execute_process(
    COMMAND ${SLIDEDP_PYTHON} -c
            "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('torch').origin).parent)"
    OUTPUT_VARIABLE torch_root OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "No torch in ${SLIDEDP_PYTHON}. Run `make setup`, or set SLIDEDP_PYTHON.")
  endif()
  set(SLIDEDP_TORCH_ROOT ${torch_root} CACHE PATH "Folder of the torch package (has include/ and lib/)")
endif()
# Programs find libtorch where it is now, installed ones too.
set(CMAKE_INSTALL_RPATH ${SLIDEDP_TORCH_ROOT}/lib)
add_library(slidedp_torch INTERFACE)
add_library(slidedp::torch ALIAS slidedp_torch)
target_include_directories(slidedp_torch SYSTEM INTERFACE
  ${SLIDEDP_TORCH_ROOT}/include ${SLIDEDP_TORCH_ROOT}/include/torch/csrc/api/include)
target_link_libraries(slidedp_torch INTERFACE
  ${SLIDEDP_TORCH_ROOT}/lib/libtorch_cpu.so ${SLIDEDP_TORCH_ROOT}/lib/libc10.so)
target_link_options(slidedp_torch INTERFACE
  -Wl,-rpath,${SLIDEDP_TORCH_ROOT}/lib -Wl,--allow-shlib-undefined)

# For a program that also links another BLAS (Ceres brings one): the first library that has a symbol gives it to the
# whole process, and both carry sgemm_. Link options stand before all libraries.
function(slidedp_link_torch_first program)
  target_link_options(${program} PRIVATE -Wl,--no-as-needed ${SLIDEDP_TORCH_ROOT}/lib/libtorch_cpu.so)
endfunction()

# CUDA is used where nvcc is found; without it everything builds for CPU ranks.
include(CheckLanguage)
option(SLIDEDP_CUDA "Build the CUDA backend where nvcc is found" ON)
if(SLIDEDP_CUDA)
  check_language(CUDA)
endif()
if(SLIDEDP_CUDA AND CMAKE_CUDA_COMPILER)
  # CMake wants a value before it enables the language; every target of ours sets its own CUDA_ARCHITECTURES.
  # Without a GPU here: code for the usual ones (80's also runs on 86 and 89), and of the last PTX, which newer ones
  # translate (100, 120).
  set(architectures "80-real;90")
  find_program(SLIDEDP_NVIDIA_SMI nvidia-smi)
  if(SLIDEDP_NVIDIA_SMI)
    execute_process(COMMAND ${SLIDEDP_NVIDIA_SMI} -L OUTPUT_VARIABLE gpus ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed AND gpus MATCHES "GPU 0")
      set(architectures native)
    endif()
  endif()
  set(SLIDEDP_CUDA_ARCHITECTURES ${architectures} CACHE STRING
    "GPU architectures to build for: native, or of 80, 86, 89, 90, 100, 120")
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES ${SLIDEDP_CUDA_ARCHITECTURES})
  endif()
  enable_language(CUDA)
  # CMake 3.25 knows no C++20 flag of nvcc's (and puts its own -std behind any compile option, where it would win).
  foreach(kind STANDARD EXTENSION)
    if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
      set(CMAKE_CUDA20_${kind}_COMPILE_OPTION "-std=c++20")
    endif()
  endforeach()
  find_package(CUDAToolkit REQUIRED)
  # The CUDA libraries that torch brings, not the toolkit's: a program must not load two of the same.
  get_filename_component(SLIDEDP_NVIDIA_LIBRARIES ${SLIDEDP_TORCH_ROOT}/../nvidia/cu13/lib ABSOLUTE)
  list(APPEND CMAKE_INSTALL_RPATH ${SLIDEDP_NVIDIA_LIBRARIES})
  set(SLIDEDP_WITH_CUDA ON)
  message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION} found: CUDA targets are configured")
else()
  set(SLIDEDP_WITH_CUDA OFF)
  message(STATUS "No nvcc found, or SLIDEDP_CUDA is off: building for CPU ranks only")
endif()

# slidedp_cuda_library(NAME GLOBS... [PUBLIC libs...]): one static library of the CUDA and C++ sources that the globs
# (relative to the project's root) find. Where they find none there is no target, so that a source can simply be added.
# Only the CUDA runtime is linked: libcuda and NVML do not exist on machines without a driver.
function(slidedp_cuda_library name)
  cmake_parse_arguments(LIB "" "" "GLOBS;PUBLIC" ${ARGN})
  list(TRANSFORM LIB_GLOBS PREPEND ${PROJECT_SOURCE_DIR}/)
  file(GLOB sources CONFIGURE_DEPENDS ${LIB_GLOBS})
  if(NOT sources)
    message(STATUS "No CUDA sources yet: no target ${name}")
    return()
  endif()
  add_library(${name} STATIC ${sources})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PUBLIC ${LIB_PUBLIC} ${SLIDEDP_NVIDIA_LIBRARIES}/libcudart.so.13)
  target_include_directories(${name} SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
  set_target_properties(${name} PROPERTIES
    CUDA_ARCHITECTURES "${SLIDEDP_CUDA_ARCHITECTURES}" CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
    CUDA_RUNTIME_LIBRARY None)
  target_precompile_headers(${name} REUSE_FROM slidedp_base)
endfunction()

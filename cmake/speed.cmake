# What nearly every source includes is parsed once for many sources (precompiled headers). A header is usable only with
# the flags that it was compiled with, so targets with flags of their own have their own, and so have the tests and the
# sources that see torch. Sources still include what they use: -D CMAKE_DISABLE_PRECOMPILE_HEADERS=ON builds as well.
set(SLIDEDP_STANDARD_HEADERS <algorithm> <array> <atomic> <chrono> <cmath> <condition_variable> <cstdint> <cstring>
  <exception> <filesystem> <fstream> <functional> <limits> <map> <memory> <mutex> <numeric> <optional> <set> <span>
  <sstream> <stdexcept> <string> <string_view> <thread> <tuple> <utility> <variant> <vector>)

find_program(CCACHE ccache)
if(CCACHE)
  # What ccache must overlook to cache what uses precompiled headers (its manual, "Precompiled headers").
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endif()

# slidedp-data is Python: a small shell program in build/ and in bin/ starts it with the project's virtual environment.
function(slidedp_data_program output script)
  set(SLIDEDP_DATA_SCRIPT ${script})
  configure_file(${PROJECT_SOURCE_DIR}/cmake/slidedp-data.in ${output} @ONLY
    FILE_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
endfunction()
slidedp_data_program(${CMAKE_BINARY_DIR}/slidedp-data ${PROJECT_SOURCE_DIR}/runtime/data/slidedp_data.py)
# The installed one finds the script beside itself, so the prefix can move.
slidedp_data_program(${CMAKE_BINARY_DIR}/installed/slidedp-data
  [[$(dirname -- "$(readlink -f -- "$0")")/../share/slidedp/slidedp_data.py]])
install(PROGRAMS ${CMAKE_BINARY_DIR}/installed/slidedp-data DESTINATION bin)
install(FILES ${PROJECT_SOURCE_DIR}/runtime/data/slidedp_data.py DESTINATION share/slidedp)

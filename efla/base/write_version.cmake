# cmake -DSOURCE=… -DVERSION=… -DOUT=… -P write_version.cmake: writes OUT from version.cc.in, only where it changes.
set(COMMIT unknown)
if(EXISTS ${SOURCE}/.git)
  execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 OUTPUT_VARIABLE described
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0)
    set(COMMIT ${described})
  endif()
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/version.cc.in ${OUT} @ONLY)

# efla_embed(OUT_VAR NAMESPACE ns HEADER h FUNCTION f FILE path): a generated source that defines `std::string_view ns::f()`,
# declared in the header h, as the bytes of a file. It is rebuilt when the file changes. Appends the source to OUT_VAR.
function(efla_embed out)
  cmake_parse_arguments(ARG "" "NAMESPACE;HEADER;FUNCTION;FILE" "" ${ARGN})
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${ARG_FUNCTION}.cc)
  add_custom_command(
    OUTPUT ${source}
    COMMAND ${CMAKE_COMMAND} -DINPUT=${ARG_FILE} -DOUTPUT=${source} -DNAMESPACE=${ARG_NAMESPACE} -DHEADER=${ARG_HEADER}
            -DFUNCTION=${ARG_FUNCTION} -P ${EFLA_EMBED_SCRIPT}
    DEPENDS ${ARG_FILE} ${EFLA_EMBED_SCRIPT}
    COMMENT "Embedding ${ARG_FILE}"
    VERBATIM)
  set(${out} ${${out}} ${source} PARENT_SCOPE)
endfunction()
set(EFLA_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_FILE})

# The build step itself: this file run as a script.
if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  file(READ ${INPUT} bytes HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
  string(REGEX REPLACE "((0x..,){24})" "\\1\n" bytes "${bytes}")
  file(WRITE ${OUTPUT}
"#include \"${HEADER}\"

namespace ${NAMESPACE} {
std::string_view ${FUNCTION}() {
  static constexpr unsigned char kBytes[] = {
${bytes}};
  return {reinterpret_cast<const char*>(kBytes), sizeof(kBytes)};
}
}  // namespace ${NAMESPACE}
")
endif()

# The library efla_xgrammar, which constrains replies to grammars: XGrammar (Apache License 2.0, https://github.com/mlc-ai/xgrammar) as pip
# downloads it, compiled here. The archive and its files stay in .xgrammar of the checkout, for all build folders. Where they are missing and
# pip cannot download them, everything else is built: EFLA_HAS_XGRAMMAR is then false, and EFLA_NO_XGRAMMAR says why.
set(version 0.2.9)
set(EFLA_XGRAMMAR_DIR ${PROJECT_SOURCE_DIR}/.xgrammar CACHE PATH "Folder of xgrammar-${version}.tar.gz")
set(archive ${EFLA_XGRAMMAR_DIR}/xgrammar-${version}.tar.gz)
set(sources ${EFLA_XGRAMMAR_DIR}/xgrammar-${version})
set(EFLA_HAS_XGRAMMAR OFF)
set(EFLA_NO_XGRAMMAR "")

if(NOT EFLA_XGRAMMAR)
  set(EFLA_NO_XGRAMMAR "EFLA_XGRAMMAR is OFF")
elseif(NOT EXISTS ${archive})
  message(STATUS "XGrammar: downloading xgrammar-${version}.tar.gz with pip into ${EFLA_XGRAMMAR_DIR}")
  execute_process(
    COMMAND python3 -m pip download --quiet --disable-pip-version-check --retries 0 --timeout 20 --no-deps --no-binary xgrammar
      --dest ${EFLA_XGRAMMAR_DIR} xgrammar==${version}
    TIMEOUT 120 RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT EXISTS ${archive})
    string(REGEX REPLACE "\n+$" "" output "${output}")
    string(REGEX REPLACE ".*\n" "" output "${output}")
    set(EFLA_NO_XGRAMMAR
      "pip could not download xgrammar-${version}.tar.gz (${output}); put the file into ${EFLA_XGRAMMAR_DIR} and configure again")
  endif()
endif()
if(NOT EFLA_NO_XGRAMMAR)
  file(SHA256 ${archive} hash)
  if(NOT hash STREQUAL "87b466bca2475e29bb0323abc62c6c33cbcbcff47e5fb800a3e2099ac9620b90")
    message(FATAL_ERROR "${archive} is not the file that was published: remove it and try again.")
  endif()
  # The files have the fixes of this checkout once a file with their hash is there.
  set(fixes ${PROJECT_SOURCE_DIR}/cmake/xgrammar/fixes.cmake)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${fixes})
  file(SHA256 ${fixes} fixes_hash)
  set(complete ${sources}/fixed-${fixes_hash})
  if(NOT EXISTS ${complete})
    file(LOCK ${EFLA_XGRAMMAR_DIR} DIRECTORY GUARD FILE)  # several presets may be configured at once
  endif()
  if(NOT EXISTS ${complete})
    file(REMOVE_RECURSE ${sources})
    file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${EFLA_XGRAMMAR_DIR}
      PATTERNS *-${version}/cpp/* *-${version}/include/* *-${version}/3rdparty/picojson/* *-${version}/3rdparty/dlpack/include/*
        *-${version}/LICENSE *-${version}/NOTICE)
    include(${fixes})
    file(TOUCH ${complete})
  endif()
  add_subdirectory(cmake/xgrammar)
  set(EFLA_HAS_XGRAMMAR ON)
  set(EFLA_XGRAMMAR_LICENCE ${sources}/LICENSE ${sources}/NOTICE)
else()
  message(STATUS "XGrammar: none, so that efla serve refuses structured output: ${EFLA_NO_XGRAMMAR}")
endif()

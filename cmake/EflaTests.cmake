# efla_test(NAME SOURCES a.cc … DEPENDS x … [HEADERS t] [WHOLE [SHARDS n]] [LABELS l …]): the GoogleTest program test_NAME,
# compiled with the precompiled headers of the target t where one is named; with the label fast where no other is given. Each of its
# tests is one of ctest's, or all of them together with WHOLE (for programs that take long to start), or together in n parts
# that can run at once (for programs that run long). Tests find the program under test
# in EFLA_PROGRAM, the source tree in EFLA_SOURCE_DIR, and data sets beside the checkout in EFLA_SHARED_DATA.
function(efla_test name)
  cmake_parse_arguments(ARG "WHOLE" "HEADERS;SHARDS" "SOURCES;DEPENDS;LABELS" ${ARGN})
  set(target test_${name})
  if(NOT ARG_LABELS)
    set(ARG_LABELS fast)
  endif()
  add_executable(${target} ${ARG_SOURCES})
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${EFLA_WARNINGS}>")
  if(NOT EFLA_SANITIZE)  # whose preset says how
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O1>)  # compiling tests takes longer than running them
  endif()
  if(ARG_HEADERS)
    efla_reuse_headers(${target} ${ARG_HEADERS})
  endif()
  target_link_libraries(${target} PRIVATE ${ARG_DEPENDS} GTest::gtest_main)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${target} PRIVATE EFLA_PROGRAM="${CMAKE_BINARY_DIR}/bin/efla"
    EFLA_SOURCE_DIR="${PROJECT_SOURCE_DIR}" EFLA_SHARED_DATA="${PROJECT_SOURCE_DIR}/../shared/data")
  if(ARG_SHARDS)
    math(EXPR last "${ARG_SHARDS} - 1")
    foreach(shard RANGE ${last})
      add_test(NAME ${name}_${shard} COMMAND ${target})
      set_tests_properties(${name}_${shard} PROPERTIES LABELS "${ARG_LABELS}"
        ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=${shard}")
    endforeach()
  elseif(ARG_WHOLE)
    add_test(NAME ${name} COMMAND ${target})
    set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" SKIP_REGULAR_EXPRESSION "SKIPPED ALL")
  else()
    gtest_discover_tests(${target} PROPERTIES LABELS "${ARG_LABELS}" DISCOVERY_TIMEOUT 60)
  endif()
endfunction()

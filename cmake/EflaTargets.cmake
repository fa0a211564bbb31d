# efla_library(NAME SOURCES a.cc … DEPENDS x … [PRIVATE_DEPENDS y …]): the library efla_NAME, alias efla::NAME, of one folder.
function(efla_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  set(target efla_${name})
  if(ARG_SOURCES)
    add_library(${target} STATIC ${ARG_SOURCES})
    set(scope PUBLIC)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${EFLA_WARNINGS}>")
    target_link_libraries(${target} PRIVATE ${ARG_PRIVATE_DEPENDS})
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(efla::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(${target} ${scope} $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:include>)
  target_compile_features(${target} ${scope} cxx_std_20)
  target_link_libraries(${target} ${scope} ${ARG_DEPENDS})
  set_property(GLOBAL APPEND PROPERTY EFLA_LIBRARIES ${target})
endfunction()

# -Wrestrict: GCC 12 reports it falsely inside std::string (GCC bug 105651).
set(EFLA_WARNINGS -Wall -Wextra -Wno-unknown-pragmas $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
if(EFLA_WERROR)
  list(APPEND EFLA_WARNINGS -Werror)
endif()
if(EFLA_SANITIZE MATCHES thread)
  # GCC warns that the thread sanitizer ignores fences, which Asio has beside its locks.
  list(APPEND EFLA_WARNINGS $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
endif()
if(EFLA_SANITIZE)
  # Without the checks that take the compiler twice as long and find what the address sanitizer finds.
  add_compile_options(-fsanitize=${EFLA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    -fno-sanitize=null,object-size,pointer-overflow,vptr)
  add_link_options(-fsanitize=${EFLA_SANITIZE})
endif()

# efla_compile_fast(TARGET): compiles TARGET at -O1, because the templates of JSON, CLI11 and Beast take much longer to compile at -O3.
# For targets whose run time is spent in the functions that they call. The sanitizers' presets set the optimisation themselves.
function(efla_compile_fast target)
  if(NOT EFLA_SANITIZE)
    target_compile_options(${target} PRIVATE -O1)
  endif()
endfunction()

# What ccache needs to cache files that use precompiled headers.
set(EFLA_PCH_OPTIONS $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)

# efla_reuse_headers(TARGET FROM): TARGET is compiled with the precompiled headers of FROM, a library; -fPIC, because GCC takes
# headers only as they were compiled.
function(efla_reuse_headers target from)
  target_precompile_headers(${target} REUSE_FROM ${from})
  target_compile_options(${target} PRIVATE ${EFLA_PCH_OPTIONS} -fPIC)
endfunction()

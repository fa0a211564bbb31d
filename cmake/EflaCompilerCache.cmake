# Compiles through ccache where it is installed. Paths below the checkout are hashed relative to it, so that a clone in
# another folder finds what the first one compiled. Precompiled headers need the sloppiness and, in CMakeLists.txt, GCC's
# -fpch-preprocess.
find_program(EFLA_CCACHE ccache)
if(EFLA_CCACHE AND PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${EFLA_CCACHE})
endif()

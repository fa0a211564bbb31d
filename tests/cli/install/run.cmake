# cmake -DBUILD=… -DWORK=… -DGENERATOR=… -DCXX=… -P run.cmake: installs BUILD under WORK, then configures, builds and
# runs the outside project of this folder against it, and checks that no path of the build is left in the installation.
file(REMOVE_RECURSE ${WORK})
set(prefix ${WORK}/prefix)

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${WORK}/outside -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
  -DCMAKE_PREFIX_PATH=${prefix})
run(${CMAKE_COMMAND} --build ${WORK}/outside)
run(${WORK}/outside/outside)
run(${prefix}/bin/efla --version)

file(GLOB_RECURSE installed ${prefix}/*.cmake ${prefix}/*.h)
foreach(file IN LISTS installed)
  file(STRINGS ${file} stray REGEX "${BUILD}")
  if(stray)
    message(FATAL_ERROR "${file} names the build folder: ${stray}")
  endif()
endforeach()
file(REMOVE_RECURSE ${WORK})

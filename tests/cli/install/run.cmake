# cmake -DBUILD=… -DWORK=… -DGENERATOR=… -DCXX=… -P run.cmake: installs BUILD under WORK, then configures, builds and
# runs the outside project of this folder against it, and checks that no path of the build is left in the installation.
file(REMOVE_RECURSE ${WORK})
set(prefix ${WORK}/prefix)

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
# The operators need Highway alone.
foreach(package IN ITEMS CURL OpenSSL ZLIB LibLZMA zstd fmt tomlplusplus nlohmann_json Torch)
  list(APPEND without -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON)
endforeach()
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${WORK}/outside -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
  -DCMAKE_PREFIX_PATH=${prefix} ${without})
run(${CMAKE_COMMAND} --build ${WORK}/outside)
run(${WORK}/outside/outside)
run(${prefix}/bin/efla --version)

# The README shows the program that was built.
file(READ ${CMAKE_CURRENT_LIST_DIR}/../../../README.md readme)
file(READ ${CMAKE_CURRENT_LIST_DIR}/main.cc shown)
string(FIND "${readme}" "${shown}" place)
if(place EQUAL -1)
  message(FATAL_ERROR "README.md does not show tests/cli/install/main.cc as it is")
endif()

file(GLOB_RECURSE installed ${prefix}/*.cmake ${prefix}/*.h)
foreach(file IN LISTS installed)
  file(STRINGS ${file} stray REGEX "${BUILD}")
  if(stray)
    message(FATAL_ERROR "${file} names the build folder: ${stray}")
  endif()
endforeach()
file(REMOVE_RECURSE ${WORK})

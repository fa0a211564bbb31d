# The PyTorch of Python_EXECUTABLE: the target efla_libtorch, TORCH_LIBRARIES, Torch_VERSION, the version of CUDA that it was built with
# or nothing in EFLA_TORCH_CUDA_VERSION, and whether it sees a GPU in EFLA_TORCH_SEES_GPU.
#
# PyTorch's own CMake files are not used: find_package(Torch) takes libraries of another LibTorch where the linker finds them first, and
# requires the CUDA toolkit. Under pip's build isolation PYTHONPATH hides the installed packages; python -E ignores it.
if(NOT Python_EXECUTABLE)  # scikit-build-core sets it
  find_program(Python_EXECUTABLE python3 REQUIRED)
endif()
block(SCOPE_FOR VARIABLES PROPAGATE EFLA_TORCH_CUDA_VERSION EFLA_TORCH_FILES EFLA_TORCH_SEES_GPU TORCH_LIBRARIES Torch_VERSION)
set(ask [[
import os, torch
print(os.path.dirname(torch.__file__), torch.__version__, torch.version.cuda or "", int(torch._C._GLIBCXX_USE_CXX11_ABI),
      int(torch.cuda.is_available()), sep=";")
]])
foreach(option IN ITEMS -u -E)
  execute_process(COMMAND ${Python_EXECUTABLE} ${option} -c "${ask}" WORKING_DIRECTORY ${CMAKE_BINARY_DIR}
    OUTPUT_VARIABLE torch ERROR_VARIABLE error OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE result)
  if(result EQUAL 0)
    break()
  endif()
endforeach()
if(NOT result EQUAL 0)
  string(REGEX REPLACE ".*\n([^\n]+)\n?$" "\\1" error "${error}")
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch (${error}): install PyTorch into the same environment first; tools that "
    "build in an environment of their own (uv, build) need --no-build-isolation.")
endif()
list(GET torch 0 folder)
list(GET torch 1 Torch_VERSION)
list(GET torch 2 EFLA_TORCH_CUDA_VERSION)
list(GET torch 3 abi)
list(GET torch 4 EFLA_TORCH_SEES_GPU)
message(STATUS "PyTorch: ${Torch_VERSION} of ${folder}")

set(EFLA_TORCH_FILES "")
foreach(name IN ITEMS torch torch_cpu c10)
  list(APPEND EFLA_TORCH_FILES ${folder}/lib/lib${name}.so)
endforeach()
if(EFLA_TORCH_CUDA_VERSION)
  add_library(torch_cuda SHARED IMPORTED)
  set_target_properties(torch_cuda PROPERTIES IMPORTED_LOCATION ${folder}/lib/libtorch_cuda.so)
  list(APPEND EFLA_TORCH_FILES ${folder}/lib/libc10_cuda.so ${folder}/lib/libtorch_cuda.so)
endif()
foreach(file IN LISTS EFLA_TORCH_FILES ITEMS ${folder}/include/torch/csrc/autograd/custom_function.h)
  if(NOT EXISTS ${file})
    message(FATAL_ERROR "PyTorch ${Torch_VERSION} lacks ${file}, which C++ extensions need.")
  endif()
endforeach()
add_library(efla_libtorch INTERFACE IMPORTED)
target_include_directories(efla_libtorch INTERFACE ${folder}/include ${folder}/include/torch/csrc/api/include)
target_compile_definitions(efla_libtorch INTERFACE _GLIBCXX_USE_CXX11_ABI=${abi} USE_DISTRIBUTED USE_C10D_GLOO
  $<$<BOOL:${EFLA_TORCH_CUDA_VERSION}>:USE_C10D_NCCL>)
target_link_libraries(efla_libtorch INTERFACE ${EFLA_TORCH_FILES})
if(TARGET torch_cuda AND NOT EFLA_PYTHON_ONLY)  # nothing calls it by name: it registers itself when it is loaded
  target_link_libraries(efla_libtorch INTERFACE
    "-Wl,--push-state,--no-as-needed,${folder}/lib/libtorch_cuda.so,--pop-state")
  cmake_path(GET folder PARENT_PATH site)
  if(EXISTS ${site}/nvidia/nccl/include/nccl.h)  # for training on several GPUs
    target_include_directories(efla_libtorch INTERFACE ${site}/nvidia/nccl/include)
  endif()
endif()
# PyTorch 2.x's libtorch.so exports parts of the C++ library that it was built with: the system's goes first.
set(TORCH_LIBRARIES stdc++ efla_libtorch)
endblock()

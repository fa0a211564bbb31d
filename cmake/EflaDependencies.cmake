# Every outside library the project uses, found in one place. All are Debian packages (scripts/install-deps).
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(hwy REQUIRED)
find_package(nlohmann_json 3 REQUIRED)
# Where LibTorch is seen too, fmt::fmt-header-only: PyTorch 2 brings headers of another fmt than the system's library.
find_package(fmt REQUIRED)
find_package(tomlplusplus 3 REQUIRED)
find_package(ZLIB REQUIRED)
find_package(LibLZMA REQUIRED)
find_package(zstd REQUIRED)
find_package(CURL REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto SSL)
find_package(Boost 1.74 REQUIRED)  # headers alone
if(EFLA_CLI)
  find_package(CLI11 REQUIRED)
endif()
if(EFLA_TORCH)
  find_package(Torch REQUIRED)
  # PyTorch 2.x's libtorch.so exports parts of the C++ library that it was built with, of which
  # std::filesystem::remove_all crashes: the system's goes first.
  list(PREPEND TORCH_LIBRARIES stdc++)
endif()
if(EFLA_TESTS)
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()

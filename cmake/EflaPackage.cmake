# cpack in the build folder (scripts/package) makes two Debian packages: efla, the program, and libefla-dev, the libraries, their
# headers and eflaConfig.cmake.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "The efla authors")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL program development)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME efla)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SHLIBDEPS ON)
# LibTorch takes any BLAS, also the slow reference. efla serve renders chat templates with jinja2.
set(CPACK_DEBIAN_PROGRAM_PACKAGE_RECOMMENDS "libopenblas0-pthread, python3-jinja2")
set(CPACK_COMPONENT_PROGRAM_DESCRIPTION "The program, which trains, evaluates and serves language models with these mixers.")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libefla-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS libhwy-dev)  # what find_package(efla) needs without COMPONENTS
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_RECOMMENDS
  "libtorch-dev, nlohmann-json3-dev, libtomlplusplus-dev, libfmt-dev, libcurl4-openssl-dev, libssl-dev, zlib1g-dev, liblzma-dev, libzstd-dev, libonig-dev, libutf8proc-dev")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "Static libraries and headers: the operator, and with LibTorch layers, models and training.")
include(CPack)

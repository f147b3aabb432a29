# `cmake --install` gives find_package(Tessera) and tessera::tessera.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Where what is installed finds LibTorch. INSTALL_RPATH_USE_LINK_PATH does not do:
# it leaves out folders of the source tree, and LibTorch lies in .venv by default.
set_target_properties(tessera tessera_cli PROPERTIES
  INSTALL_RPATH "${TESSERA_TORCH_ROOT_FOUND}/lib")

set(_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/Tessera")
install(TARGETS tessera EXPORT TesseraTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS tessera_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(EXPORT TesseraTargets NAMESPACE tessera:: DESTINATION ${_package_dir})

configure_package_config_file(
  cmake/TesseraConfig.cmake.in "${CMAKE_BINARY_DIR}/TesseraConfig.cmake"
  INSTALL_DESTINATION ${_package_dir})
write_basic_package_version_file(
  "${CMAKE_BINARY_DIR}/TesseraConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_BINARY_DIR}/TesseraConfig.cmake"
  "${CMAKE_BINARY_DIR}/TesseraConfigVersion.cmake"
  cmake/TesseraLibTorch.cmake
  DESTINATION ${_package_dir})

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
# The program knows its own manual pages and completions.
install(CODE "
  set(share \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DATADIR}\")
  function(tessera_prints file)
    execute_process(COMMAND \"$<TARGET_FILE:tessera_cli>\" \${ARGN}
      OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
    file(WRITE \"\${file}\" \"\${text}\")
  endfunction()
  execute_process(COMMAND \"$<TARGET_FILE:tessera_cli>\" man --write \"\${share}/man/man1\"
    COMMAND_ERROR_IS_FATAL ANY)
  tessera_prints(\"\${share}/bash-completion/completions/tessera\" completion bash)
  tessera_prints(\"\${share}/zsh/site-functions/_tessera\" completion zsh)
")
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

# Scripts for Python, which need nothing of Tessera.
install(PROGRAMS
  ${PROJECT_SOURCE_DIR}/python/make_token_file.py
  ${PROJECT_SOURCE_DIR}/python/tessera_export.py
  DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera)

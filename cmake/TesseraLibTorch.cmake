# Imported target tessera::libtorch, made from a LibTorch's include/ and lib/.
#
# find_package(Torch) is not used: the CUDA wheel's needs a CUDA toolkit and the
# CPU wheel's adds stray run paths. Looked for, in this order:
#   TESSERA_TORCH_ROOT   folder with include/torch and lib/libtorch.so
#   Torch_DIR            <root>/share/cmake/Torch, or the root itself
#   the same two in the environment
#   the python3 on PATH  whose site-packages hold torch

if(TARGET tessera::libtorch)
  return()
endif()

function(_tessera_find_torch_root out)
  set(candidates "")
  foreach(dir IN ITEMS "${TESSERA_TORCH_ROOT}" "${Torch_DIR}" "$ENV{TESSERA_TORCH_ROOT}" "$ENV{Torch_DIR}")
    if(dir)
      list(APPEND candidates "${dir}" "${dir}/../../..")
    endif()
  endforeach()
  if(NOT candidates)
    find_program(TESSERA_PYTHON python3)
    if(TESSERA_PYTHON)
      execute_process(
        COMMAND ${TESSERA_PYTHON} -c
          "import importlib.util as u; s=u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
        OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      list(APPEND candidates "${root}")
    endif()
  endif()
  foreach(dir IN LISTS candidates)
    if(EXISTS "${dir}/include/torch/csrc/api/include/torch/torch.h" AND EXISTS "${dir}/lib/libtorch.so")
      get_filename_component(dir "${dir}" ABSOLUTE)
      set(${out} "${dir}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(FATAL_ERROR
    "No LibTorch found (looked in: ${candidates}). Set Torch_DIR to one, or run `make build`, which installs it.")
endfunction()

_tessera_find_torch_root(TESSERA_TORCH_ROOT_FOUND)
set(_root "${TESSERA_TORCH_ROOT_FOUND}")

set(_version_header "${_root}/include/torch/headeronly/version.h")
if(NOT EXISTS "${_version_header}")
  set(_version_header "${_root}/include/torch/csrc/api/include/torch/version.h")
endif()
file(STRINGS "${_version_header}" _lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9;]" "" _lines "${_lines}")
string(REPLACE ";" "." TESSERA_TORCH_VERSION "${_lines}")
if(TESSERA_TORCH_VERSION VERSION_LESS 2.11 OR TESSERA_TORCH_VERSION VERSION_GREATER_EQUAL 2.14)
  message(FATAL_ERROR
    "LibTorch ${TESSERA_TORCH_VERSION} in ${_root}: Tessera is built and tested with 2.11 to 2.13. Point Torch_DIR at one of these.")
endif()

# libstdc++ comes first, and libtorch.so, which only names the others, is left
# out: both export functions of std::filesystem, the latter from an old libstdc++
# with other layouts, and a program that finds those before its own crashes.
add_library(tessera::libtorch INTERFACE IMPORTED)
set_target_properties(tessera::libtorch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES "${_root}/include;${_root}/include/torch/csrc/api/include"
  INTERFACE_LINK_DIRECTORIES "${_root}/lib"
  INTERFACE_LINK_LIBRARIES "stdc++;${_root}/lib/libtorch_cpu.so;${_root}/lib/libc10.so")

set(TESSERA_TORCH_HAS_CUDA OFF)
if(EXISTS "${_root}/lib/libtorch_cuda.so")
  set(TESSERA_TORCH_HAS_CUDA ON)
  # --no-as-needed: libtorch_cuda registers kernels and is named by no symbol.
  set_property(TARGET tessera::libtorch APPEND PROPERTY INTERFACE_LINK_LIBRARIES
    "-Wl,--no-as-needed" "${_root}/lib/libtorch_cuda.so" "${_root}/lib/libc10_cuda.so" "-Wl,--as-needed")
endif()
message(STATUS "LibTorch ${TESSERA_TORCH_VERSION} (CUDA: ${TESSERA_TORCH_HAS_CUDA}) in ${_root}")

# Headers that LibTorch does not bring. Each message names the Debian package.

function(tessera_find_header variable header package)
  find_path(${variable} ${header})
  if(NOT ${variable})
    message(FATAL_ERROR "<${header}> not found: install ${package}, or run `make build`, which does.")
  endif()
endfunction()

tessera_find_header(TESSERA_GLOO_INCLUDE gloo/algorithm.h libgloo-dev)
tessera_find_header(TESSERA_XXHASH_INCLUDE xxhash.h libxxhash-dev)
tessera_find_header(TESSERA_JSON_INCLUDE nlohmann/json.hpp nlohmann-json3-dev)
tessera_find_header(TESSERA_CLI11_INCLUDE CLI/CLI.hpp libcli11-dev)

add_library(tessera_headers INTERFACE)
target_include_directories(tessera_headers SYSTEM INTERFACE
  ${TESSERA_GLOO_INCLUDE} ${TESSERA_XXHASH_INCLUDE} ${TESSERA_CLI11_INCLUDE})

# NCCL's library comes with LibTorch, its header may or may not be there.
set(TESSERA_HAS_NCCL OFF)
set(TESSERA_HAS_CUDA_HEADERS OFF) # for NCCL's backend, captured steps and kernels of our own
if(TESSERA_TORCH_HAS_CUDA)
  file(GLOB _wheel_nccl "${TESSERA_TORCH_ROOT_FOUND}/../nvidia/*/include")
  find_path(TESSERA_NCCL_INCLUDE nccl.h HINTS ${_wheel_nccl} /usr/local/cuda/include)
  # The wheels' CUDA headers include others, which torch does not bring along:
  # crt/ is in nvidia-cuda-crt, nv/ in nvidia-cuda-cccl.
  if(NOT TESSERA_CUDA_INCLUDE)
    foreach(_folder IN ITEMS ${_wheel_nccl} "$ENV{CUDA_HOME}/include" /usr/local/cuda/include
            "/usr/local/cuda/targets/${CMAKE_SYSTEM_PROCESSOR}-linux/include")
      foreach(_cccl IN ITEMS "${_folder}" "${_folder}/cccl")
        if(NOT TESSERA_CUDA_INCLUDE AND EXISTS "${_folder}/crt/host_config.h" AND EXISTS "${_cccl}/nv/target")
          set(_found "${_folder}" "${_cccl}")
          # Headers of libraries, which NCCL's backend reads, may be elsewhere.
          find_path(TESSERA_CUSPARSE_INCLUDE cusparse.h HINTS "${_folder}" ${_wheel_nccl} NO_CACHE)
          if(TESSERA_CUSPARSE_INCLUDE)
            list(APPEND _found "${TESSERA_CUSPARSE_INCLUDE}")
          endif()
          list(REMOVE_DUPLICATES _found)
          set(TESSERA_CUDA_INCLUDE "${_found}" CACHE STRING "Folders of CUDA's headers")
        endif()
      endforeach()
    endforeach()
  endif()
  if(TESSERA_CUDA_INCLUDE)
    set(TESSERA_HAS_CUDA_HEADERS ON)
    target_include_directories(tessera_headers SYSTEM INTERFACE ${TESSERA_CUDA_INCLUDE})
  endif()
  if(TESSERA_NCCL_INCLUDE AND TESSERA_CUDA_INCLUDE)
    set(TESSERA_HAS_NCCL ON)
    target_include_directories(tessera_headers SYSTEM INTERFACE ${TESSERA_NCCL_INCLUDE})
  else()
    if(TESSERA_CUDA_INCLUDE)
      set(_missing "nccl.h was not found: built without NCCL")
    else()
      set(_missing "CUDA's headers were not found: built without NCCL, captured steps, \
the kernel of linear_cross_entropy and fake wires for GPU tensors")
    endif()
    message(STATUS "LibTorch has CUDA, but ${_missing}. "
      "With LibTorch from pip: pip install nvidia-cuda-crt nvidia-cuda-cccl, in the version of its CUDA")
  endif()
endif()

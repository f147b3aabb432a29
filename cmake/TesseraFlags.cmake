# What every target of ours is compiled with.

add_library(tessera_options INTERFACE)
target_compile_options(tessera_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Werror
  # Designated initializers leave fields out on purpose.
  -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(tessera_options INTERFACE
    # g++ 12 warns falsely inside its own headers at -O2 and above.
    -Wno-restrict -Wno-maybe-uninitialized -Wno-stringop-overflow
    -Wno-stringop-overread -Wno-array-bounds
    # g++ looks for memory to free from 128 MB on, in kB here. That takes a tenth of the
    # time of a source and finds little: 1.3 GB at most instead of 1.2.
    --param=ggc-min-heapsize=4000000)
  if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    # g++ 13 takes every reference for one into a temporary argument.
    target_compile_options(tessera_options INTERFACE -Wno-dangling-reference)
  endif()
elseif(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # Fields that a mutex guards: base/mutex.h.
  target_compile_options(tessera_options INTERFACE -Wthread-safety -Wno-overloaded-virtual)
endif()
# -fPIC everywhere, not -fPIE for programs: they share precompiled headers with
# libraries, which must be compiled alike.
target_compile_options(tessera_options INTERFACE
  -fPIC -fno-omit-frame-pointer -Winvalid-pch)

# at::RecordFunction has one member less with NDEBUG, and LibTorch is released with
# NDEBUG: without it, as in a debug build, ours would read the wrong bytes.
target_compile_definitions(tessera_options INTERFACE
  $<$<NOT:$<CONFIG:Release,RelWithDebInfo,MinSizeRel>>:NDEBUG>)

if(TESSERA_SANITIZE)
  target_compile_options(tessera_options INTERFACE
    -fsanitize=${TESSERA_SANITIZE} -fno-sanitize-recover=all)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZE})
  # The type checks of UBSan want type information that LibTorch hides.
  if(TESSERA_SANITIZE MATCHES "undefined")
    target_compile_options(tessera_options INTERFACE -fno-sanitize=vptr)
  endif()
  # LibTorch's headers have a fence, which TSan does not know; nothing of ours
  # rests on it.
  if(TESSERA_SANITIZE MATCHES "thread")
    target_compile_options(tessera_options INTERFACE
      $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
  endif()
endif()

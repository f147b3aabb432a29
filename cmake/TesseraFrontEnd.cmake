# tessera_use_front_end(TARGET): precompiles LibTorch's front end (torch/torch.h) for
# a test, a benchmark or an example. Reading it takes half a minute, so there is
# one for all of them, with GoogleTest where that is installed.
#
# Whoever reads a precompiled header should have the flags that it was made with (g++
# does not say which levels of optimization may differ). All are compiled with -O1:
# they are compiled more often than they are run, and what takes time in them is in
# the library or in LibTorch. A source that computes by itself does without
# (examples/gpt/tokenizer.cpp).
find_package(GTest QUIET)

add_library(tessera_front_end OBJECT ${CMAKE_CURRENT_LIST_DIR}/front_end.cpp)
target_link_libraries(tessera_front_end PUBLIC tessera::libtorch tessera_options)
target_compile_options(tessera_front_end PUBLIC $<$<NOT:$<CONFIG:Debug>>:-O1>)
target_precompile_headers(tessera_front_end PRIVATE <torch/torch.h>)
if(GTest_FOUND)
  target_include_directories(tessera_front_end SYSTEM PRIVATE
    $<TARGET_PROPERTY:GTest::gmock,INTERFACE_INCLUDE_DIRECTORIES>)
  # The macros that GoogleTest wants must be the same for all.
  target_compile_options(tessera_front_end PUBLIC
    $<TARGET_PROPERTY:GTest::gtest,INTERFACE_COMPILE_OPTIONS>)
  target_precompile_headers(tessera_front_end PRIVATE <gmock/gmock.h> <gtest/gtest.h>)
endif()

function(tessera_use_front_end target)
  target_link_libraries(${target} PRIVATE tessera_front_end)
  target_precompile_headers(${target} REUSE_FROM tessera_front_end)
endfunction()

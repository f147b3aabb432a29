# tessera_compile_together(TARGET COUNT): compiles the sources of a room (a folder
# with what is below it) as one, COUNT of them at most, in groups of even size.
# Sources with options of their own, and those with SKIP_UNITY_BUILD_INCLUSION, are
# compiled alone.
function(tessera_compile_together target count)
  get_target_property(sources ${target} SOURCES)
  set(rooms)
  foreach(source IN LISTS sources)
    get_source_file_property(is_alone ${source} SKIP_UNITY_BUILD_INCLUSION)
    if(is_alone OR source MATCHES "^\\$<" OR IS_ABSOLUTE ${source}) # one of two, or generated
      continue()
    endif()
    if(source MATCHES "^([^/]+)/")
      set(room ${CMAKE_MATCH_1})
    else()
      set(room top)
    endif()
    list(APPEND rooms ${room})
    list(APPEND _sources_of_${room} ${source})
  endforeach()
  list(REMOVE_DUPLICATES rooms)
  foreach(room IN LISTS rooms)
    list(LENGTH _sources_of_${room} size)
    math(EXPR groups "(${size} + ${count} - 1) / ${count}")
    set(number 0)
    foreach(source IN LISTS _sources_of_${room})
      math(EXPR group "${number} * ${groups} / ${size}")
      math(EXPR number "${number} + 1")
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP "${room}_${group}")
    endforeach()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # g++ takes what a source has for itself for a header's, and warns.
  target_compile_options(${target} PRIVATE
    $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endfunction()

# tessera_compile_together(TARGET COUNT): compiles COUNT sources of a folder at a
# time, as one.
function(tessera_compile_together target count)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    if(source MATCHES "^\\$<") # one of two sources: compiled by itself
      continue()
    endif()
    get_filename_component(folder ${source} DIRECTORY)
    string(MAKE_C_IDENTIFIER "${folder}" folder)
    math(EXPR number "${_number_of_${folder}} + 0")
    math(EXPR group "${number} / ${count}")
    math(EXPR _number_of_${folder} "${number} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP "${folder}_${group}")
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

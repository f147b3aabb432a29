# tessera_embed(OUT.cpp HEADER NAMESPACE NAME FILE [NAME FILE]...): at build time
# makes a source that defines each NAME, a std::string_view, as FILE's text.
# HEADER declares them.

set(_tessera_embed_script ${CMAKE_CURRENT_LIST_FILE})

function(tessera_embed out header namespace)
  set(files)
  set(pairs ${ARGN})
  while(pairs)
    list(POP_FRONT pairs name file)
    list(APPEND files ${file})
  endwhile()
  add_custom_command(
    OUTPUT ${out}
    COMMAND ${CMAKE_COMMAND} -DOUT=${out} -DHEADER=${header} -DNAMESPACE=${namespace}
      "-DPAIRS=${ARGN}" -P ${_tessera_embed_script}
    DEPENDS ${files} ${_tessera_embed_script}
    VERBATIM)
endfunction()

# As a script: what the command above runs.
if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  set(source "// Made by cmake/TesseraEmbed.cmake.\n#include \"${HEADER}\"\n\n")
  string(APPEND source "namespace ${NAMESPACE} {\n\n")
  while(PAIRS)
    list(POP_FRONT PAIRS name file)
    file(READ ${file} text)
    string(FIND "${text}" ")embed\"" end)
    if(NOT end EQUAL -1)
      message(FATAL_ERROR "${file} has the text that ends the literal it becomes")
    endif()
    string(APPEND source "const std::string_view ${name} = R\"embed(${text})embed\";\n\n")
  endwhile()
  string(APPEND source "} // namespace ${NAMESPACE}\n")
  file(WRITE ${OUT} "${source}")
endif()

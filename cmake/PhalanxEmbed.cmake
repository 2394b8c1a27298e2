# phalanx_embed(<target> NAMESPACE <namespace> HEADER <header> <constant> <file> [<constant> <file>]...)
#
# Compiles text files into a library. Each becomes a constant that the header declares as
#
#   struct EmbeddedText { std::string_view text, sha256; };    // the digest in hexadecimal
#   extern const EmbeddedText kConstant;
#
# A changed file is embedded anew by the next build. A raw string literal holds the text, so a file of more than 64 KiB
# is an error, as is one that ends the literal.
function(phalanx_embed target)
  cmake_parse_arguments(ARG "" "NAMESPACE;HEADER" "" ${ARGN})
  set(source "// Made by cmake/PhalanxEmbed.cmake.\n#include \"${ARG_HEADER}\"\n\nnamespace ${ARG_NAMESPACE} {\n")
  while(ARG_UNPARSED_ARGUMENTS)
    list(POP_FRONT ARG_UNPARSED_ARGUMENTS constant file)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    file(READ ${file} text)
    file(SHA256 ${file} digest)
    file(SIZE ${file} size)
    string(FIND "${text}" ")embedded\"" end)
    if(NOT end EQUAL -1 OR size GREATER 65535)
      message(FATAL_ERROR "${file} cannot be embedded: expected at most 65,535 bytes (found ${size}) without )embedded\"")
    endif()
    string(APPEND source "const EmbeddedText ${constant}{R\"embedded(${text})embedded\",\n\"${digest}\"};\n")
  endwhile()
  set(output ${CMAKE_CURRENT_BINARY_DIR}/${target}_embedded.cc)
  file(CONFIGURE OUTPUT ${output} CONTENT "@source@}  // namespace ${ARG_NAMESPACE}\n" @ONLY)
  target_sources(${target} PRIVATE ${output})
  set_source_files_properties(${output} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# Refuses a file of somebody else's that is not the one whose SHA-256 digest stands in SHA256SUMS beside it.
function(phalanx_require_digest file)
  get_filename_component(folder ${file} DIRECTORY)
  get_filename_component(name ${file} NAME)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${folder}/SHA256SUMS)
  file(SHA256 ${file} found)
  file(STRINGS ${folder}/SHA256SUMS line REGEX "  ${name}$")
  if(NOT line MATCHES "^${found} ")
    message(FATAL_ERROR "${file} has the SHA-256 digest ${found}; ${folder}/SHA256SUMS says: ${line}\n"
                        "Take the file as it was, or update both as ${folder}/README.md says.")
  endif()
endfunction()

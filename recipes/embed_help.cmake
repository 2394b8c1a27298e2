# cmake -DSOURCE=recipe.cc -DOUTPUT=help.cc -P embed_help.cmake: the first comment of the source as the text of --help.
file(READ "${SOURCE}" text)
string(FIND "${text}" "\n#" end)
string(SUBSTRING "${text}" 0 ${end} text)
string(REGEX REPLACE "(^|\n)// ?" "\\1" text "${text}")
file(WRITE "${OUTPUT}" "extern const char* const kRecipeHelp;\nconst char* const kRecipeHelp = R\"help(${text})help\";\n")

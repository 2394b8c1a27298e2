# The parsers of files that come from elsewhere, under libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   cmake -S . -B build/fuzz -DPHALANX_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++    (scripts/fuzz.sh does)
#
# None of them knows torch, so neither torch nor the rest of Phalanx is looked for.

if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
  message(FATAL_ERROR "libFuzzer is clang's: -DCMAKE_CXX_COMPILER=clang++")
endif()
set(PHALANX_TESTS OFF)
set(PHALANX_SANITIZE "")
include(PhalanxTools)
include(PhalanxModule)
include(PhalanxEmbed)

# Frames and lines for the reports; -O1 because building must not take longer than running.
add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
                    -gline-tables-only -O1 -UNDEBUG -Wno-unused-command-line-argument)
add_link_options(-fsanitize=address,undefined)

find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
set(PHALANX_UNITY ON)
foreach(folder base observe schedule layout models/config kernels/gpu data/tokenizer data/jinja data data/corpus data/chat checkpoint/files plan config report infer/jobs)
  add_subdirectory(${PROJECT_SOURCE_DIR}/phalanx/${folder} EXCLUDE_FROM_ALL)
endforeach()
add_subdirectory(${PROJECT_SOURCE_DIR}/tests/fuzz)

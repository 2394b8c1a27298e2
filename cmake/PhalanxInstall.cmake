# cmake --install: libraries, headers and a package, so that another project can say
#
#   find_package(Phalanx REQUIRED)
#   target_link_libraries(app PRIVATE Phalanx::phalanx)      # or one folder: Phalanx::base

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Phalanx)
get_property(_libraries GLOBAL PROPERTY PHALANX_LIBRARIES)

install(TARGETS ${_libraries} phalanx_all phalanx_torch EXPORT PhalanxTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(EXPORT PhalanxTargets NAMESPACE Phalanx:: DESTINATION ${_package_dir} COMPONENT library)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/phalanx DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library
        FILES_MATCHING PATTERN "*.h"
        PATTERN "*_test.h" EXCLUDE PATTERN "testing" EXCLUDE PATTERN "testdata" EXCLUDE)

# Which packages the libraries' link lines name, so that the config file finds those and no others.
set(PHALANX_PACKAGES)
set(PHALANX_PKG_CONFIG_MODULES)
foreach(_library ${_libraries})
  get_target_property(_links ${_library} INTERFACE_LINK_LIBRARIES)
  foreach(_link ${_links})
    # What stands in a BUILD_INTERFACE expression is gone from the installed target.
    if(_link MATCHES "BUILD_INTERFACE:")
      continue()
    endif()
    if(_link MATCHES "(^|:)([A-Za-z0-9_]+)::" AND NOT CMAKE_MATCH_2 STREQUAL "Phalanx")
      list(APPEND PHALANX_PACKAGES ${CMAKE_MATCH_2})
    endif()
  endforeach()
endforeach()
list(REMOVE_DUPLICATES PHALANX_PACKAGES)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/PhalanxConfig.cmake.in
  ${PROJECT_BINARY_DIR}/package/PhalanxConfig.cmake INSTALL_DESTINATION ${_package_dir}
  NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/PhalanxConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/PhalanxConfig.cmake
              ${PROJECT_BINARY_DIR}/package/PhalanxConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/PhalanxCudart.cmake
              ${PROJECT_SOURCE_DIR}/cmake/PhalanxTorch.cmake
              ${PROJECT_SOURCE_DIR}/cmake/PhalanxTorchSearch.cmake
        DESTINATION ${_package_dir} COMPONENT library)

# The licences of Phalanx and of what the build embeds. The programs and the library both need them, so both components
# install them.
set(_licence_dir ${CMAKE_INSTALL_DATAROOTDIR}/doc/phalanx)
file(GLOB _licences RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/third_party/*/LICENSE)
foreach(_component library Unspecified)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${_licence_dir} COMPONENT ${_component})
  foreach(_licence ${_licences})
    get_filename_component(_folder ${_licence} DIRECTORY)
    install(FILES ${PROJECT_SOURCE_DIR}/${_licence} DESTINATION ${_licence_dir}/${_folder} COMPONENT ${_component})
  endforeach()
endforeach()

# The programs have install rules of their own; they must find the libraries of wheels from there too.
if(TARGET phalanx-worker)
  set_target_properties(phalanx PROPERTIES INSTALL_RPATH "${PHALANX_PYARROW}")
  set_target_properties(phalanx-worker PROPERTIES INSTALL_RPATH "${PHALANX_TORCH_ROOT}/lib;${PHALANX_PYARROW}")
endif()

if(PHALANX_TESTS)
  add_test(NAME install
           COMMAND ${CMAKE_COMMAND} -DBUILD=${PROJECT_BINARY_DIR} -DSOURCE=${PROJECT_SOURCE_DIR}/tests/install
                   -DWORK=${PROJECT_BINARY_DIR}/tests/install -DGENERATOR=${CMAKE_GENERATOR}
                   -DCOMPILER=${CMAKE_CXX_COMPILER} -DLAUNCHER=${PHALANX_CCACHE}
                   -DSANITIZE=${PHALANX_SANITIZE} -DPREFIX_PATH=${CMAKE_PREFIX_PATH}
                   -P ${PROJECT_SOURCE_DIR}/tests/install/run.cmake)
  set_tests_properties(install PROPERTIES LABELS full ENVIRONMENT "OMP_NUM_THREADS=1")
  phalanx_time_limit(600 install)
endif()

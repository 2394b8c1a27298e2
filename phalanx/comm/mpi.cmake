# The mpi backend is built where Open MPI is found. Included after the library and its tests have been declared.
option(PHALANX_MPI "Build the mpi backend where Open MPI is found" ON)
if(PHALANX_MPI)
  find_package(MPI QUIET COMPONENTS C)
endif()
target_sources(phalanx_comm PRIVATE mpi.cc)
if(MPI_C_FOUND)
  # Headers and library for what calls MPI itself.
  add_library(phalanx_mpi INTERFACE)
  target_include_directories(phalanx_mpi SYSTEM INTERFACE ${MPI_C_INCLUDE_DIRS})
  target_compile_definitions(phalanx_mpi INTERFACE PHALANX_HAVE_MPI OMPI_SKIP_MPICXX)
  target_link_libraries(phalanx_mpi INTERFACE ${MPI_C_LIBRARIES})

  target_sources(phalanx_comm PRIVATE mpi_backend.cc mpi_collectives.cc mpi_messages.cc mpi_process.cc
                                      mpi_requests.cc mpi_table.cc)
  target_include_directories(phalanx_comm SYSTEM PRIVATE ${MPI_C_INCLUDE_DIRS})
  target_compile_definitions(phalanx_comm PRIVATE PHALANX_HAVE_MPI OMPI_SKIP_MPICXX)
  # It alone is linked with MPI, and opened at run time (mpi_table.h): beside the programs, or in lib/phalanx.
  add_library(phalanx_mpi_module MODULE mpi_module.cc)
  target_link_libraries(phalanx_mpi_module PRIVATE phalanx_mpi phalanx_warnings)
  target_include_directories(phalanx_mpi_module PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_features(phalanx_mpi_module PRIVATE cxx_std_20)
  set_target_properties(phalanx_mpi_module PROPERTIES OUTPUT_NAME phalanx_mpi LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  add_dependencies(phalanx_comm phalanx_mpi_module)
  target_link_libraries(phalanx_comm PUBLIC ${CMAKE_DL_LIBS})
  include(GNUInstallDirs)
  install(TARGETS phalanx_mpi_module LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/phalanx COMPONENT library)
  target_link_options(phalanx_comm INTERFACE
    $<INSTALL_INTERFACE:-Wl,-rpath,$<INSTALL_PREFIX>/${CMAKE_INSTALL_LIBDIR}/phalanx>)
  message(STATUS "Phalanx: MPI in ${MPI_C_LIBRARIES}")
else()
  message(STATUS "Phalanx: no MPI, so no mpi backend")
endif()

# Programs start without any MPI.
function(phalanx_needs_no_mpi program)
  if(PHALANX_TESTS AND CMAKE_READELF)
    add_test(NAME ${program}_needs_no_mpi COMMAND sh -c "! ${CMAKE_READELF} -d $<TARGET_FILE:${program}> | grep 'NEEDED.*libmpi'")
  endif()
endfunction()

if(PHALANX_TESTS)
  target_sources(comm_test PRIVATE mpi_backend_test.cc mpi_ranks_test.cc)
  if(TARGET phalanx_mpi)
    target_sources(comm_test PRIVATE testing/mpi_calls.cc)
    # The module's calls of MPI go through the counters of mpi_calls.cc.
    target_link_libraries(comm_test PRIVATE phalanx_mpi)
    target_link_options(comm_test PRIVATE "LINKER:--export-dynamic-symbol=MPI_*")
  endif()
  # Each case starts ranks with mpirun.
  get_test_property(comm ENVIRONMENT environment)
  string(REGEX REPLACE "GTEST_FILTER=-([^;]*)" "GTEST_FILTER=-\\1:*Mpi*" environment "${environment}")
  set_tests_properties(comm PROPERTIES ENVIRONMENT "${environment}")
  add_test(NAME comm_mpi COMMAND comm_test --gtest_brief=1 --gtest_filter=*Mpi*)
  set_tests_properties(comm_mpi PROPERTIES TIMEOUT 600 ENVIRONMENT "OMP_NUM_THREADS=1")
endif()

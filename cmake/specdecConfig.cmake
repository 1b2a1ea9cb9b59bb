# find_package(specdec CONFIG): the C++ runtime that the wheel of specdec_ext holds.
#   cmake -B build -Dspecdec_DIR="$(python -c 'import specdec_ext; print(specdec_ext.cmake_dir())')"
# gives the target specdec::specdec.
include(CMakeFindDependencyMacro)
find_dependency(Threads)

get_filename_component(specdec_ROOT "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT TARGET specdec::specdec)
  add_library(specdec::specdec STATIC IMPORTED)
  set_target_properties(
    specdec::specdec
    PROPERTIES IMPORTED_LOCATION "${specdec_ROOT}/lib/libspecdec.a"
               # Headers of the core name each other relative to core/.
               INTERFACE_INCLUDE_DIRECTORIES
               "${specdec_ROOT}/include;${specdec_ROOT}/include/specdec/core"
               INTERFACE_COMPILE_FEATURES cxx_std_20
               INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS}")
endif()

# The store is a library of its own, without torch: the launcher, which starts in milliseconds, hosts one.
phalanx_library(store
  SOURCES store.cc local_store.cc tcp_store.cc tcp_store_server.cc tcp_store_socket.cc
  DEPENDS base
  LINK fmt::fmt)

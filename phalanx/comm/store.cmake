# The store is a library of its own, without torch: the launcher, which starts in milliseconds, hosts one.
# libcrypto is for the HMAC of its greeting.
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
phalanx_library(store COLD
  SOURCES job_secret.cc store.cc store_greeting.cc store_proof.cc local_store.cc tcp_store.cc
          tcp_store_server.cc tcp_store_socket.cc
  DEPENDS base
  LINK fmt::fmt OpenSSL::Crypto)
phalanx_test(store SOURCES store_security_test.cc store_test.cc)

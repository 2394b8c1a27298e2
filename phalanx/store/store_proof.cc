#include "phalanx/store/store_proof.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "phalanx/base/error.h"

namespace phalanx {

std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  for (std::size_t filled = 0; filled < count;) {
    const ssize_t got = getrandom(bytes.data() + filled, count - filled, 0);
    if (got < 0 && errno != EINTR) throw CommError(fmt::format("getrandom: {}", std::strerror(errno)));
    if (got > 0) filled += static_cast<std::size_t>(got);
  }
  return bytes;
}

std::string hmac_sha256(std::string_view key, std::string_view message) {
  std::string result(kProofBytes, '\0');
  unsigned int size = 0;
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(message.data()), message.size(),
           reinterpret_cast<unsigned char*>(result.data()), &size) == nullptr ||
      size != kProofBytes)
    throw CommError("HMAC-SHA256 failed in libcrypto");
  return result;
}

std::string store_proof(std::string_view secret, ProofOf role, std::string_view client_nonce,
                        std::string_view server_nonce) {
  std::string message(role == ProofOf::client ? "phalanx store client 1" : "phalanx store server 1");
  message.append(client_nonce).append(server_nonce);  // both of fixed length: no two splits give the same message
  return hmac_sha256(secret, message);
}

bool equal_secrets(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace phalanx

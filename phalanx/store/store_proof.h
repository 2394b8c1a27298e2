// The cryptography of the handshake (store_handshake.h): random nonces and proofs of knowing the secret.
//
// A proof is HMAC-SHA256(secret, role, both nonces). The role prevents one side's proof from being returned to it as
// the other's. The nonces prevent a recorded proof from being reused. HMAC and SHA-256 come from OpenSSL's libcrypto,
// which every node has and others maintain. It costs the first proof of a process some 1.5 ms.
#pragma once

#include <string>
#include <string_view>

namespace phalanx {

inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kProofBytes = 32;

/// From the kernel's generator. Throws CommError.
std::string random_bytes(std::size_t count);

std::string hmac_sha256(std::string_view key, std::string_view message);

enum class ProofOf { client, server };
std::string store_proof(std::string_view secret, ProofOf role, std::string_view client_nonce,
                        std::string_view server_nonce);

/// Compares in a time that does not depend on where they differ.
bool equal_secrets(std::string_view a, std::string_view b);

}  // namespace phalanx

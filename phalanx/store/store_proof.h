// The cryptography of the store's greeting: random nonces and proofs of knowing the secret. Used by comm/ only.
//
// A proof is HMAC-SHA256(secret, role, both nonces). The role keeps one side's proof from being handed back to it as
// the other's; the nonces keep a recorded one from being used again. HMAC and SHA-256 are those of OpenSSL's libcrypto,
// which is on every machine anyhow and kept up by others; it costs the first proof of a process some 1.5 ms.
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

/// In a time that does not depend on where they differ.
bool equal_secrets(std::string_view a, std::string_view b);

}  // namespace phalanx

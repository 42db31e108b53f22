// Stands in for the AWS provider where that cannot be downloaded: it knows every argument, type and block of the
// resources that our modules use, and nothing of AWS.
//
// Terraform itself refuses unknown arguments, missing ones and wrong types, from the schema that a provider states. So
// `terraform validate` and `terraform test` with a mocked provider mean the same here as with the real one, except for
// values that only the real one checks; those of them that have met our modules are in refusals.go. Everything that would
// reach AWS is an error.
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"

	"github.com/hashicorp/terraform-plugin-go/tfprotov5"
	"github.com/hashicorp/terraform-plugin-go/tfprotov5/tf5server"
	"github.com/hashicorp/terraform-plugin-go/tftypes"
)

const address = "registry.terraform.io/hashicorp/aws"

//go:embed aws-schema.json
var document []byte

// The form of `terraform providers schema -json`.
type schemas struct {
	Providers map[string]struct {
		Provider    schema            `json:"provider"`
		Resources   map[string]schema `json:"resource_schemas"`
		DataSources map[string]schema `json:"data_source_schemas"`
	} `json:"provider_schemas"`
}

type schema struct {
	Version int64 `json:"version"`
	Block   block `json:"block"`
}

type block struct {
	Attributes map[string]attribute   `json:"attributes"`
	BlockTypes map[string]nestedBlock `json:"block_types"`
}

type attribute struct {
	Type     json.RawMessage `json:"type"`
	Required bool            `json:"required"`
	Optional bool            `json:"optional"`
	Computed bool            `json:"computed"`
}

type nestedBlock struct {
	NestingMode string `json:"nesting_mode"`
	MinItems    int64  `json:"min_items"`
	MaxItems    int64  `json:"max_items"`
	Block       block  `json:"block"`
}

var nestingModes = map[string]tfprotov5.SchemaNestedBlockNestingMode{
	"single": tfprotov5.SchemaNestedBlockNestingModeSingle,
	"list":   tfprotov5.SchemaNestedBlockNestingModeList,
	"set":    tfprotov5.SchemaNestedBlockNestingModeSet,
}

func (s schema) convert() (*tfprotov5.Schema, error) {
	converted, err := s.Block.convert()
	return &tfprotov5.Schema{Version: s.Version, Block: converted}, err
}

func (b block) convert() (*tfprotov5.SchemaBlock, error) {
	converted := &tfprotov5.SchemaBlock{}
	for name, attribute := range b.Attributes {
		kind, err := tftypes.ParseJSONType(attribute.Type) //nolint:staticcheck // the one reader of this form of a type
		if err != nil {
			return nil, fmt.Errorf("type of %s: %w", name, err)
		}
		converted.Attributes = append(converted.Attributes, &tfprotov5.SchemaAttribute{
			Name:     name,
			Type:     kind,
			Required: attribute.Required,
			Optional: attribute.Optional,
			Computed: attribute.Computed,
		})
	}
	for name, nested := range b.BlockTypes {
		mode, known := nestingModes[nested.NestingMode]
		if !known {
			return nil, fmt.Errorf("block %s has the unknown nesting mode %q", name, nested.NestingMode)
		}
		inner, err := nested.Block.convert()
		if err != nil {
			return nil, fmt.Errorf("block %s: %w", name, err)
		}
		converted.BlockTypes = append(converted.BlockTypes, &tfprotov5.SchemaNestedBlock{
			TypeName: name,
			Block:    inner,
			Nesting:  mode,
			MinItems: nested.MinItems,
			MaxItems: nested.MaxItems,
		})
	}
	return converted, nil
}

// provider answers what its schema can answer; the embedded interface is nil, so any other call ends the process.
type provider struct {
	tfprotov5.ProviderServer
	schema *tfprotov5.GetProviderSchemaResponse
}

func newProvider() (*provider, error) {
	var all schemas
	if err := json.Unmarshal(document, &all); err != nil {
		return nil, err
	}
	ours, known := all.Providers[address]
	if !known {
		return nil, fmt.Errorf("aws-schema.json has no %s", address)
	}
	own, err := ours.Provider.convert()
	if err != nil {
		return nil, err
	}
	response := &tfprotov5.GetProviderSchemaResponse{
		Provider:          own,
		ResourceSchemas:   map[string]*tfprotov5.Schema{},
		DataSourceSchemas: map[string]*tfprotov5.Schema{},
	}
	for name, of := range ours.Resources {
		if response.ResourceSchemas[name], err = of.convert(); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	for name, of := range ours.DataSources {
		if response.DataSourceSchemas[name], err = of.convert(); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return &provider{schema: response}, nil
}

func noAWS() []*tfprotov5.Diagnostic {
	return []*tfprotov5.Diagnostic{{
		Severity: tfprotov5.DiagnosticSeverityError,
		Summary:  "this provider only knows the schema of the AWS provider and never reaches AWS",
	}}
}

func (p *provider) GetMetadata(context.Context, *tfprotov5.GetMetadataRequest) (*tfprotov5.GetMetadataResponse, error) {
	response := &tfprotov5.GetMetadataResponse{}
	for name := range p.schema.ResourceSchemas {
		response.Resources = append(response.Resources, tfprotov5.ResourceMetadata{TypeName: name})
	}
	for name := range p.schema.DataSourceSchemas {
		response.DataSources = append(response.DataSources, tfprotov5.DataSourceMetadata{TypeName: name})
	}
	return response, nil
}

func (p *provider) GetProviderSchema(context.Context, *tfprotov5.GetProviderSchemaRequest) (*tfprotov5.GetProviderSchemaResponse, error) {
	return p.schema, nil
}

func (p *provider) GetResourceIdentitySchemas(context.Context, *tfprotov5.GetResourceIdentitySchemasRequest) (*tfprotov5.GetResourceIdentitySchemasResponse, error) {
	return &tfprotov5.GetResourceIdentitySchemasResponse{}, nil
}

func (p *provider) PrepareProviderConfig(_ context.Context, request *tfprotov5.PrepareProviderConfigRequest) (*tfprotov5.PrepareProviderConfigResponse, error) {
	return &tfprotov5.PrepareProviderConfigResponse{PreparedConfig: request.Config}, nil
}

func (p *provider) ValidateResourceTypeConfig(_ context.Context, request *tfprotov5.ValidateResourceTypeConfigRequest) (*tfprotov5.ValidateResourceTypeConfigResponse, error) {
	diagnostics, err := p.refused(request)
	return &tfprotov5.ValidateResourceTypeConfigResponse{Diagnostics: diagnostics}, err
}

func (p *provider) ValidateDataSourceConfig(context.Context, *tfprotov5.ValidateDataSourceConfigRequest) (*tfprotov5.ValidateDataSourceConfigResponse, error) {
	return &tfprotov5.ValidateDataSourceConfigResponse{}, nil
}

func (p *provider) ConfigureProvider(context.Context, *tfprotov5.ConfigureProviderRequest) (*tfprotov5.ConfigureProviderResponse, error) {
	return &tfprotov5.ConfigureProviderResponse{Diagnostics: noAWS()}, nil
}

func (p *provider) StopProvider(context.Context, *tfprotov5.StopProviderRequest) (*tfprotov5.StopProviderResponse, error) {
	return &tfprotov5.StopProviderResponse{}, nil
}

func main() {
	provider, err := newProvider()
	if err == nil {
		err = tf5server.Serve(address, func() tfprotov5.ProviderServer { return provider })
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}
